"""One case of a numerics file as the checks see it. No checks, no comparing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

from tandem.algorithms.tokens import (
    Reduce,
)

Results = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One case of the file, with its arrays as tensors of ``dtype``."""

    id: str
    inputs: Mapping[str, Any]
    params: Mapping[str, Any]
    dtype: torch.dtype

    def __contains__(self, key: str) -> bool:
        return key in self.inputs

    def floats(self, key: str) -> Tensor:
        return torch.tensor(decode(self.inputs[key]), dtype=self.dtype)

    def ints(self, key: str) -> Tensor:
        return torch.tensor(self.inputs[key], dtype=torch.int64)

    def mask(self, key: str = "mask") -> Tensor:
        return torch.tensor(self.inputs[key]).bool()

    def groups(self) -> Tensor:
        names = sorted(set(self.inputs["group"]))
        return torch.tensor([names.index(name) for name in self.inputs["group"]])

    def param(self, key: str, default: Any = None) -> Any:
        value = self.params.get(key, default)
        return default if value is None else value

    def renamed(self, **names: str) -> dict[str, Any]:
        """The parameters the case has, under our names: ``renamed(clip_low="eps_low")``."""
        return {our: self.params[key] for our, key in names.items() if key in self.params}


def decode(value: Any) -> Any:
    """Nested lists of numbers with ``"nan"``, ``"inf"`` and ``"-inf"`` made floats."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    return float(value)


def over_ranks(calls: Sequence[Callable[[Reduce], Tensor]]) -> list[Tensor]:
    """Run one call a rank, with a ``reduce`` that sums over all of them."""
    barrier = Barrier(len(calls))
    slots: list[Tensor] = [torch.empty(0)] * len(calls)

    def run(rank: int) -> Tensor:
        def reduce(local: Tensor) -> Tensor:
            slots[rank] = local
            barrier.wait()
            total = torch.stack(slots).sum(dim=0)
            barrier.wait()
            return total

        return calls[rank](reduce)

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, range(len(calls))))
