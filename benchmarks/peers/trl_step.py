"""TRL's SFT step beside the loop written by hand; started by ``train_step.py`` in TRL's Python."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import datasets
import torch
import trl
from hand_loop import LR, MAX_NORM, HandLoop
from timing import Pair, timed
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback


class Clock(TrainerCallback):
    """Before every optimizer step of the trainer one step by hand, then the times of both."""

    def __init__(self, by_hand: Any) -> None:
        self.by_hand = by_hand
        self.times: dict[str, list[Pair]] = {"peer": [], "hand": []}

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.times["hand"].append(timed(self.by_hand))
        self.started = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        wall, cpu = self.started
        pair = 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)
        self.times["peer"].append(pair)


def tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Of no use but that the trainer asks for one."""
    from tokenizers import Tokenizer, models

    vocabulary = {f"t{i}": i for i in range(vocab_size)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="t0", eos_token="t1")


def main() -> None:
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(spec["threads"])
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(spec["vocab_size"], (n,), generator=generator) for n in spec["lengths"]]
    per_pass = max(1, spec["cap"] // max(spec["lengths"]))
    plan = [list(range(i, min(i + per_pass, len(rows)))) for i in range(0, len(rows), per_pass)]
    hand = HandLoop(spec["model_path"], bfloat16=spec["bfloat16"])
    clock = Clock(lambda: hand.step_padded(rows, plan))
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(
                spec["model_path"], dtype=torch.float32, attn_implementation="sdpa"
            ),
            args=trl.SFTConfig(
                output_dir=folder,
                per_device_train_batch_size=per_pass,
                gradient_accumulation_steps=len(plan),
                max_steps=spec["repeats"] + 1,
                learning_rate=LR,
                lr_scheduler_type="constant",
                max_grad_norm=MAX_NORM,
                max_length=None,
                optim="adamw_torch_fused",
                use_cpu=True,
                bf16=spec["bfloat16"],
                gradient_checkpointing=False,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=datasets.Dataset.from_list(
                [{"input_ids": row.tolist(), "labels": row.tolist()} for row in rows]
            ),
            processing_class=tokenizer(spec["vocab_size"]),
            callbacks=[clock],
        )
        trainer.train()
    times = {side: found[1:] for side, found in clock.times.items()}
    print("\n" + json.dumps({"version": trl.__version__, **times}))


if __name__ == "__main__":
    main()
