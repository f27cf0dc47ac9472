"""TRL's SFT step beside the loop written by hand; started by ``train_step.py`` in TRL's Python."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import datasets
import torch
import trl
from beside import Setting, tell
from hand_loop import LR, MAX_NORM
from random_models import make_tokenizer
from timing import Pair, timed
from transformers import AutoModelForCausalLM, TrainerCallback


class Clock(TrainerCallback):
    """Before every optimizer step of the trainer one step by hand, then the times of both."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.times: dict[str, list[Pair]] = {"trainer": [], "hand": []}
        self.losses: dict[str, float] = {}

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not self.losses:
            self.losses["hand"] = self.setting.step_by_hand()
        self.times["hand"].append(timed(self.setting.step_by_hand))
        self.started = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        wall, cpu = self.started
        pair = 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)
        self.times["trainer"].append(pair)

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        self.losses.setdefault("trainer", logs.get("loss", logs.get("train_loss", 0.0)))


def main() -> None:
    setting = Setting()
    clock = Clock(setting)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(
                setting.model_path, dtype=torch.float32, attn_implementation="sdpa"
            ),
            args=trl.SFTConfig(
                output_dir=folder,
                per_device_train_batch_size=setting.per_pass,
                gradient_accumulation_steps=len(setting.plan),
                max_steps=setting.repeats + 1,
                learning_rate=LR,
                lr_scheduler_type="constant",
                max_grad_norm=MAX_NORM,
                max_length=None,
                optim="adamw_torch_fused",
                use_cpu=True,
                bf16=setting.bfloat16,
                gradient_checkpointing=False,
                logging_strategy="steps",
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=datasets.Dataset.from_list(
                [{"input_ids": row.tolist(), "labels": row.tolist()} for row in setting.rows]
            ),
            processing_class=make_tokenizer(setting.vocab_size),
            callbacks=[clock],
        )
        trainer.train()
    times = {side: found[1:] for side, found in clock.times.items()}
    tell(trl.__version__, times, clock.losses)


if __name__ == "__main__":
    main()
