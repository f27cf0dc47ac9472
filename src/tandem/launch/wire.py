"""What ranks send each other, as bytes: JSON and safetensors over gloo. Nothing is unpickled.

What a command means belongs to ``group`` and ``follower``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor

from tandem.errors import DataError

Tensors = dict[str, Tensor]


class Wire:
    """A group of all ranks on the host; every rank calls every method, in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank: int = dist.get_rank(group)
        self.world: int = dist.get_world_size(group)

    def announce(
        self, message: Mapping[str, Any] | None, *, flag: bool = False
    ) -> tuple[dict[str, Any], bool]:
        """The first rank's JSON object, on all; and whether any rank raised its ``flag``."""
        payload = _buffer(json.dumps(message).encode()) if self.rank == 0 else None
        size = torch.tensor([0 if payload is None else len(payload)])
        dist.broadcast(size, group_src=0, group=self._group)
        if payload is None:
            payload = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(payload, group_src=0, group=self._group)
        flags = torch.tensor([int(flag)])
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        found: dict[str, Any] = json.loads(payload.numpy().tobytes())
        return found, bool(flags)

    def deal(self, shares: Sequence[Tensors] | None) -> Tensors:
        """The tensors that the first rank, which alone gives ``shares``, has for this rank."""
        if shares is None:
            return self._receive(0)
        for rank in range(1, self.world):
            self._send(shares[rank], rank)
        return shares[0]

    def collect(self, own: Tensors) -> list[Tensors]:
        """The tensors of all ranks in their order, on the first rank; nothing on the others."""
        if self.rank != 0:
            self._send(own, 0)
            return []
        return [own, *(self._receive(rank) for rank in range(1, self.world))]

    def _send(self, tensors: Tensors, rank: int) -> None:
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                raise DataError(
                    f"{name}: got {type(tensor).__name__}, only tensors go to other ranks"
                )
        payload = _buffer(
            safetensors.torch.save({n: t.cpu().contiguous() for n, t in tensors.items()})
        )
        dist.send(torch.tensor([len(payload)]), group_dst=rank, group=self._group)
        dist.send(payload, group_dst=rank, group=self._group)

    def _receive(self, rank: int) -> Tensors:
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, group_src=rank, group=self._group)
        payload = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(payload, group_src=rank, group=self._group)
        return safetensors.torch.load(payload.numpy().tobytes())


def _buffer(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
