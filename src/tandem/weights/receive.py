"""The receiving end: open a published version, verify it, copy it into a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from tandem.errors import WeightSyncError
from tandem.weights.bucket import Heed, go_on
from tandem.weights.manifest import MemoryLocation, Published, compare_specs, dtype_name
from tandem.weights.transports.inprocess import open_memory
from tandem.weights.transports.mapped import open_file


@contextmanager
def open_published(published: Published, *, heed: Heed = go_on) -> Iterator[dict[str, Tensor]]:
    """Every tensor of a version by name, without a copy; valid only inside the ``with``.

    The sender does not reuse the memory meanwhile. Treat the tensors as read-only. What ``heed``
    raises between the digests of two tensors ends the opening.

    Raises:
        WeightSyncError: a digest differs, or the version was replaced before it was read.
    """
    if isinstance(published.location, MemoryLocation):
        opened = open_memory(published.location, published.manifest, heed)
    else:
        opened = open_file(published.location, published.manifest, heed)
    with opened as tensors:
        yield tensors


def load_into(model_params: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy ``tensors`` into ``model_params`` in place, all or nothing.

    A name that is missing is fine if its parameter is the same memory as one that is there (tied).

    Raises:
        WeightSyncError: names every missing, unexpected, mis-shaped and wrongly typed tensor;
            nothing was copied.
    """
    loaded = {_identity(model_params[name]) for name in tensors if name in model_params}
    expected = {
        name: (tuple(param.shape), dtype_name(param.dtype))
        for name, param in model_params.items()
        if name in tensors or _identity(param) not in loaded
    }
    received = {name: (tuple(t.shape), dtype_name(t.dtype)) for name, t in tensors.items()}
    problems = compare_specs(expected, received)
    if problems:
        raise WeightSyncError(
            f"weights do not fit the model: {'; '.join(problems)}. Both ends must hold the same "
            "model (WeightUpdateMeta.dtype casts at the sender); nothing was loaded"
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            model_params[name].detach().copy_(tensor)


def _identity(tensor: Tensor) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    storage = tensor.untyped_storage().data_ptr()
    return storage, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()
