"""verl's FSDP2 engine under its own SFT loss beside the loop written by hand, in verl's Python.

It has no platform for a CPU; the one here is the tests' own, and adds nothing to a step.
"""

from __future__ import annotations

import os
from functools import partial
from importlib.metadata import version

os.environ.setdefault("VERL_PLATFORM", "cpu")
# The device its engines are registered for, whatever the platform calls itself.
os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")

import torch
from beside import Setting, compare, one_rank
from hand_loop import LR, MAX_NORM
from tensordict import TensorDict
from tests.peers import verl_platform  # noqa: F401 (registers; must come before verl)

# isort: split
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
)
from verl.workers.engine import BaseEngine, EngineRegistry
from verl.workers.utils.losses import sft_loss


def open_engine(setting: Setting) -> BaseEngine:
    kind = "bf16" if setting.bfloat16 else "fp32"
    engine = EngineRegistry.new(
        "language_model",
        "fsdp2",
        model_config=HFModelConfig(
            path=setting.model_path,
            load_tokenizer=False,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "sdpa"},
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            reshard_after_forward=False,
            mixed_precision={"param_dtype": kind, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        ),
        optimizer_config=FSDPOptimizerConfig(
            lr=LR,
            weight_decay=0.0,
            clip_grad=MAX_NORM,
            total_training_steps=1000,
            override_optimizer_config={"fused": True},
        ),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def make_data(setting: Setting, *, packed: bool) -> TensorDict:
    """As verl's SFT trainer has it: whole rows without padding."""

    def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    data = TensorDict(
        {
            "input_ids": jagged(setting.rows),
            "position_ids": jagged([torch.arange(len(row)) for row in setting.rows]),
            "loss_mask": jagged([(torch.arange(len(row)) > 0).long() for row in setting.rows]),
        },
        batch_size=[len(setting.rows)],
    )
    tu.assign_non_tensor(
        data,
        temperature=1.0,
        use_remove_padding=packed,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=setting.cap,
        global_batch_size=len(setting.rows),
    )
    return data


def main() -> None:
    setting = Setting()
    loss = partial(sft_loss, None)

    def step(engine: BaseEngine, packed: bool) -> float:
        with engine.train_mode():
            found = engine.train_batch(make_data(setting, packed=packed), loss)
            engine.lr_scheduler_step()
        return float(sum(found["loss"]))

    with one_rank():
        ways = {"packed": (open_engine(setting), True), "padded": (open_engine(setting), False)}
        compare(
            setting,
            version("verl"),
            {name: lambda way=way: step(*way) for name, way in ways.items()},
        )


if __name__ == "__main__":
    main()
