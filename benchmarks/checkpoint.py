"""A checkpoint that a thread writes: how long training is blocked, how long the whole takes.

    python benchmarks/checkpoint.py --threads 1 --json checkpoint.json
    python benchmarks/checkpoint.py --size tiny --tokens 256 --length 32 --repeats 5

The state is model and AdamW of the 42 M model, 480 MiB. Blocked is the block of ``staging``, beside
a copy of the same bytes from one buffer into another one that is kept. The whole save, until the
checkpoint has landed, stands beside a plain write of the same bytes with fsync, on the same disk;
neither counts the removal of what was written before. Training that goes on meanwhile is compared
to training alone.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import parser, report
from random_models import SIZES, model_config, save_model
from timing import Pair, ratio, summary, timed
from train_step import equal_lengths, make_batch, make_rows, open_engine

from tandem.algorithms.sft import sft_loss
from tandem.checkpoint import BackgroundWriter, staging
from tandem.train import TrainEngine


class Saves:
    """Checkpoints of one engine in a run directory of their own, each under a new step."""

    def __init__(self, engine: TrainEngine, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self.writer = BackgroundWriter()
        self.step = 0

    def start(self) -> None:
        """What training waits for."""
        self.step += 1
        with staging(self.folder, self.step, keep=None, background=self.writer) as target:
            self.engine.save_checkpoint(str(target.path / "policy"), global_step=self.step)

    def finish(self) -> None:
        """Until it has landed."""
        self.writer.wait()

    def remove(self) -> None:
        shutil.rmtree(self._landed)

    def size_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._landed.rglob("*") if path.is_file())

    @property
    def _landed(self) -> Path:
        return self.folder / "checkpoints" / f"step_{self.step}"


def write_raw(source: torch.Tensor, path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        view = memoryview(source.numpy())
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())


def measure_saving(saves: Saves, repeats: int) -> dict[str, Any]:
    saves.start()
    saves.finish()
    size = saves.size_bytes()
    source = torch.ones(size, dtype=torch.uint8)
    saves.remove()
    kept = torch.zeros_like(source)
    raw = saves.folder / "raw"
    sides = ("blocked", "copy", "whole", "raw_write")
    times: dict[str, list[Pair]] = {side: [] for side in sides}
    for _ in range(repeats + 1):
        times["copy"].append(timed(lambda: kept.copy_(source)))
        started = time.perf_counter()
        times["blocked"].append(timed(saves.start))
        saves.finish()
        times["whole"].append((1e3 * (time.perf_counter() - started), 0.0))
        saves.remove()
        times["raw_write"].append(timed(lambda: write_raw(source, raw)))
        raw.unlink()
    times = {side: found[1:] for side, found in times.items()}
    return {
        "size_mib": round(size / 2**20, 1),
        **{side: summary(found) for side, found in times.items()},
        "blocked_over_copy": _wall(ratio, times["blocked"], times["copy"]),
        "whole_over_raw_write": _wall(ratio, times["whole"], times["raw_write"]),
    }


def _wall(
    compare: Callable[..., dict[str, float]], first: list[Pair], second: list[Pair]
) -> dict[str, float]:
    """Without the processor time, which of two threads says nothing."""
    found = compare([(w, 1.0) for w, _ in first], [(w, 1.0) for w, _ in second])
    return {name: value for name, value in found.items() if name != "cpu_median"}


def measure_slowdown(saves: Saves, step: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """Steps while a checkpoint is written, and as many without, in turn."""
    step()
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(repeats):
        saves.start()
        count = 0
        while saves.writer.is_busy:
            beside.append(timed(step)[0])
            count += 1
        saves.finish()
        saves.remove()
        alone += [timed(step)[0] for _ in range(max(count, 1))]
    if not beside:
        return {"steps_beside_a_save": 0}
    return {
        "steps_beside_a_save": len(beside),
        "alone_ms": round(statistics.median(alone), 2),
        "beside_ms": round(statistics.median(beside), 2),
        "slowdown": round(statistics.median(beside) / statistics.median(alone), 3),
    }


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--size", choices=SIZES, default="42m")
    arguments.add_argument("--tokens", type=int, default=512, help="of one training step")
    arguments.add_argument("--length", type=int, default=128)
    arguments.add_argument("--repeats", type=int, default=7)
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--folder", type=Path, help="on the disk to be measured")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        engine = open_engine(save_model(options.size, folder), cap=options.tokens)
        lengths = equal_lengths(options.tokens, options.length)
        batch = make_batch(make_rows(lengths, model_config(options.size).vocab_size))
        engine.train_batch(batch, sft_loss)
        saves = Saves(engine, folder / "run")
        figures = {
            "threads": options.threads,
            "saving": measure_saving(saves, options.repeats),
            "training": measure_slowdown(
                saves, lambda: engine.train_batch(batch, sft_loss), options.repeats
            ),
        }
        engine.destroy()
    finally:
        shutil.rmtree(folder)
    report(figures, options.json)


if __name__ == "__main__":
    main()
