"""Whole tensors and the parts of them that one rank holds.

Which tensors are sharded how is decided by the backend.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, sharing its memory; all of it unless it is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()
    return part


def whole_tensor(tensor: Tensor) -> Tensor:
    """All of a tensor, which may share its memory; all ranks that hold a part must call."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements = list(tensor.placements)
    # One axis at a time, outermost first: the shards of layers that are divided too are strided.
    for axis in range(len(placements)):
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    # Uneven shards are gathered with padding, which must not travel along.
    return compact(tensor.to_local())


def compact(tensor: Tensor) -> Tensor:
    """The same values, contiguous, in memory that holds nothing else."""
    if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def own_slice(sharded: DTensor, whole: Tensor) -> Tensor:
    """The part of ``whole`` that belongs into this rank's part of ``sharded``."""
    shape, offset = compute_local_shape_and_global_offset(
        sharded.shape, sharded.device_mesh, sharded.placements
    )
    return whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]


def class_name(model: nn.Module) -> str:
    """Name of the class of ``model`` as it was before sharding gave it one of its own."""
    return next(c for c in type(model).__mro__ if not issubclass(c, FSDPModule)).__name__


def num_copies(tensor: Tensor) -> int:
    """How many ranks of the default group hold the same elements of ``tensor``."""
    shards = 1
    if isinstance(tensor, DTensor):
        for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
            shards *= 1 if placement.is_replicate() else size
    return dist.get_world_size() // shards
