"""AReaL's FSDP engine under its own LM loss beside the loop written by hand, in AReaL's Python.

Its rows are kept apart by FlashAttention, which no CPU has. With sdpa, as here, rows that share a
micro-batch attend to one another; ``alone`` gives each a micro-batch of its own and is right.
"""

from __future__ import annotations

import logging
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from beside import Setting, compare, one_rank
from hand_loop import LR, MAX_NORM
from random_models import make_tokenizer

# Its logger imports them and is told not to use them; their pins fight with the others'.
for tracker in ("swanlab", "trackio"):
    sys.modules[tracker] = types.ModuleType(tracker)
    sys.modules[tracker].__spec__ = ModuleSpec(tracker, None)

from areal.api import FinetuneSpec  # noqa: E402
from areal.api.cli_args import MicroBatchSpec, OptimizerConfig, TrainEngineConfig  # noqa: E402
from areal.engine.fsdp_engine import FSDPEngine  # noqa: E402
from areal.trainer.sft.lm_engine import LMEngine  # noqa: E402
from areal.utils import stats_tracker  # noqa: E402
from areal.version import __version__  # noqa: E402


def open_engine(setting: Setting, max_tokens: int) -> LMEngine:
    config = TrainEngineConfig(
        experiment_name="step",
        trial_name="step",
        path=setting.model_path,
        backend="fsdp:d1",
        attn_impl="sdpa",
        dtype="bfloat16" if setting.bfloat16 else "float32",
        mb_spec=MicroBatchSpec(max_tokens_per_mb=max_tokens),
        optimizer=OptimizerConfig(
            lr=LR, weight_decay=0.0, warmup_steps_proportion=0.0, gradient_clipping=MAX_NORM
        ),
    )
    engine = FSDPEngine(config)
    engine.create_process_group()
    engine.initialize(None, FinetuneSpec(1, 1000 * len(setting.rows), len(setting.rows)))
    return LMEngine(engine)


def make_data(setting: Setting) -> list[dict[str, Any]]:
    """One dictionary a row; every token after the first is trained on."""
    return [
        {
            "input_ids": row[None],
            "attention_mask": torch.ones(1, len(row), dtype=torch.bool),
            "loss_mask": (torch.arange(len(row)) > 0)[None],
        }
        for row in setting.rows
    ]


def main() -> None:
    setting = Setting()
    make_tokenizer(setting.vocab_size).save_pretrained(setting.model_path)
    logging.disable(logging.INFO)
    data = make_data(setting)
    with one_rank():
        engines = {
            "packed": open_engine(setting, setting.cap),
            "alone": open_engine(setting, max(len(row) for row in setting.rows)),
        }

        def step(engine: LMEngine) -> float:
            engine.train_lm(data)
            return float(stats_tracker.export_all()["sft/loss/avg"])

        compare(
            setting,
            __version__,
            {name: lambda engine=engine: step(engine) for name, engine in engines.items()},
        )


if __name__ == "__main__":
    main()
