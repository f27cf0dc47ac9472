"""The whole loop of ``tandem sft`` beside a loop written by hand on the same tokens.

A part of ``train_step.py``. The trainer is the real one: order and batches of the data, the
engine's step, the schedule, metrics and their record, the progress line. A tracker of its own,
called at the end of every step, takes the time and does the same step by hand before the trainer
goes on. Opening the model and the data lies before the first measured step, the checkpoint behind
the last.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from hand_loop import LR, MAX_NORM, HandLoop
from random_models import make_tokenizer
from timing import Pair, ratio, summary, timed
from torch import Tensor

from tandem.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    RunConfig,
    SFTConfig,
    SFTStageConfig,
    TrackingConfig,
    TrainConfig,
)
from tandem.data.demonstrations import open_demonstrations
from tandem.data.packing import cut_microbatches
from tandem.models.loading import load_tokenizer
from tandem.observe.trackers import TRACKERS
from tandem.trainers.sft import run_sft


class Clock:
    """A tracker: from where it returns to where it is called again is one step of the loop."""

    def __init__(self, hand: HandLoop, batches: list[list[Tensor]], cap: int) -> None:
        self.hand, self.batches, self.cap = hand, batches, cap
        self.ours: list[Pair] = []
        self.theirs: list[Pair] = []
        self.resumed: Pair | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        if self.resumed is not None:
            self.ours.append((1e3 * (wall - self.resumed[0]), 1e3 * (cpu - self.resumed[1])))
        rows, loss = self.batches[step - 1], 0.0
        plan = cut_microbatches([len(row) for row in rows], max_tokens=self.cap)

        def by_hand() -> None:
            nonlocal loss
            loss = self.hand.step_padded(rows, plan)

        found = timed(by_hand)
        if self.resumed is not None:
            self.theirs.append(found)
        if abs(loss - metrics["sft/loss"]) > 5e-2:
            raise RuntimeError(f"the two do not train alike: loss {metrics['sft/loss']} and {loss}")
        self.resumed = time.perf_counter(), time.process_time()

    def close(self) -> None:
        pass


def write_rows(path: Path, num_rows: int, length: int, vocab_size: int) -> None:
    """A prompt of one word, an answer, and the end of text that the trainer adds: ``length``."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(2, vocab_size, (num_rows, length - 1), generator=generator).tolist()
    with path.open("w", encoding="utf-8") as file:
        for prompt, *answer in words:
            row = {"prompt": f"<{prompt}>", "answer": " ".join(f"<{word}>" for word in answer)}
            file.write(json.dumps(row) + "\n")


def measure_loop(model_path: str, vocab_size: int, options: Any) -> dict[str, Any]:
    folder = Path(model_path).parent
    make_tokenizer(vocab_size).save_pretrained(model_path)
    num_steps, batch_size = options.repeats + 1, options.tokens // options.length
    write_rows(folder / "rows.jsonl", num_steps * batch_size, options.length, vocab_size)
    stage = SFTStageConfig(
        data=DataConfig(source="jsonl", path=str(folder / "rows.jsonl")),
        steps=num_steps,
        batch_size=batch_size,
        max_length=options.length,
        completion_only=False,
        checkpoint_every=0,
        train=TrainConfig(
            device="cpu",
            dtype="bfloat16" if options.bfloat16 else "float32",
            lr=LR,
            max_grad_norm=MAX_NORM,
            max_tokens_per_microbatch=options.cap,
        ),
    )
    data = open_demonstrations(stage, load_tokenizer(model_path), seed=0)
    batches = [
        [torch.tensor(row.input_ids) for row in batch]
        for batch in data.batches(batch_size, epochs=1)
    ]
    clock = Clock(HandLoop(model_path, bfloat16=options.bfloat16), batches, options.cap)
    TRACKERS["trackio"] = lambda *_: clock
    config = SFTConfig(
        run=RunConfig(name="loop", output_dir=str(folder), threads=options.threads),
        model=ModelConfig(path=model_path),
        tracking=TrackingConfig(trackers=("trackio",)),
        checkpoint=CheckpointConfig(export_model=False),
        sft=stage,
    )
    with redirect_stdout(sys.stderr):
        run_sft(config)
    return {
        "steps": len(clock.ours),
        "loop": summary(clock.ours),
        "hand": summary(clock.theirs),
        "loop_over_hand": ratio(clock.ours, clock.theirs),
    }
