"""A backend of a third party: data parallelism that sums whole gradients over gloo.

Registered when this module is imported, as an entry point of ``tandem.train_engines`` would be.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.train import EngineRegistry, LocalTrainEngine

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

    def _copy_full(self, into: Tensor, full: Tensor | None) -> None:
        with torch.no_grad():
            if full is not None:
                into.copy_(full)
            dist.broadcast(into, src=0)
