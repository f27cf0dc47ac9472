"""A backend of a third party: data parallelism that sums whole gradients over gloo.

Registered when this module is imported, as an entry point of ``tandem.train_engines`` would be.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tandem.train import EngineRegistry, LocalTrainEngine
from tandem.types import SaveLoadMeta

BACKEND = "data_parallel"


@EngineRegistry.register("language_model", BACKEND, "cpu")
class DataParallelEngine(LocalTrainEngine):
    """The local engine on every rank; gradients are summed once, when the step needs them."""

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_data_parallel_size(self) -> int:
        return dist.get_world_size()

    def get_data_parallel_group(self) -> Any:
        return dist.group.WORLD

    @property
    def parallelism_group(self) -> Any:
        return dist.group.WORLD

    def _grad_norm(self) -> float:
        for parameter in self.parameters().values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
        return super()._grad_norm()

    def _sum_over_ranks(self, value: float) -> float:
        return sum(self._gather_over_ranks(value))

    def _gather_over_ranks(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found

    def _agree_max(self, value: int) -> int:
        return max(self._gather_over_ranks(value))

    def save(self, meta: SaveLoadMeta) -> None:
        if dist.get_rank() == 0:
            super().save(meta)
        dist.barrier()

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if dist.get_rank() == 0:
            super().save_checkpoint(*args, **kwargs)
        dist.barrier()
