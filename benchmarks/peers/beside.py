"""What every peer's script shares: the rows, the loop written by hand beside it, and the report.

Runs in the peer's own Python, so it needs what ``hand_loop`` needs and nothing of Tandem.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from hand_loop import HandLoop
from timing import Pair, take_turns
from torch import Tensor


class Setting:
    """What ``train_step.py`` asks for. Rows are of equal length, ``per_pass`` of them a pass."""

    def __init__(self) -> None:
        spec = json.loads(sys.argv[1])
        self.model_path: str = spec["model_path"]
        self.vocab_size: int = spec["vocab_size"]
        self.cap: int = spec["cap"]
        self.repeats: int = spec["repeats"]
        self.bfloat16: bool = spec["bfloat16"]
        torch.set_num_threads(spec["threads"])
        generator = torch.Generator().manual_seed(0)
        self.rows: list[Tensor] = [
            torch.randint(self.vocab_size, (n,), generator=generator) for n in spec["lengths"]
        ]
        self.per_pass = max(1, self.cap // max(spec["lengths"]))
        self.plan = [
            list(range(first, min(first + self.per_pass, len(self.rows))))
            for first in range(0, len(self.rows), self.per_pass)
        ]
        self._hand = HandLoop(self.model_path, bfloat16=self.bfloat16)

    def step_by_hand(self) -> float:
        """Padded, which costs rows of equal length nothing; the loss."""
        return self._hand.step_padded(self.rows, self.plan)


def compare(setting: Setting, version: str, sides: dict[str, Callable[[], float]]) -> None:
    """Time the first steps of a peer's ways, the fastest of which counts, and the loop by hand."""
    functions = {**sides, "hand": setting.step_by_hand}
    losses = {side: function() for side, function in functions.items()}
    times = take_turns(functions, setting.repeats)
    tell(version, times, losses)


def tell(version: str, times: dict[str, list[Pair]], losses: dict[str, float]) -> None:
    """The last line of the output is what ``train_step.py`` reads."""
    print("\n" + json.dumps({"version": version, "times": times, "losses": losses}))


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone, as the engines that shard insist on one."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ.update(alone, MASTER_ADDR="127.0.0.1", MASTER_PORT="29574")
    with tempfile.TemporaryDirectory() as folder:
        store = (Path(folder) / "store").as_uri()
        torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()
