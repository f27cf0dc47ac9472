"""Named tensors in one safetensors file. Values and identity survive: tied tensors come back tied.

Numbers, strings and nested state belong to ``state.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tandem.checkpoint.background import deferral_at
from tandem.errors import CheckpointError

_TIED = "tandem.tied"


def write_tensors(path: Path | str, tensors: Mapping[str, Tensor]) -> None:
    """Write ``tensors``; names that are the same memory are written once and tied again on reading.

    Inside a staging with a background writer they are copied, and written when the block has ended.

    Raises:
        CheckpointError: the file cannot be written.
    """
    path = Path(path)
    stored: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first_names: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        first = first_names.setdefault(_identity(name, tensor), name)
        if first == name:
            stored[name] = tensor
        else:
            tied[name] = first
    deferral = deferral_at(path)
    if deferral is not None:
        deferral.later(partial(_save, path, deferral.copied(path, stored), tied))
        return
    used: set[int] = set()
    _save(path, {name: _own_memory(tensor, used) for name, tensor in stored.items()}, tied)


def _save(path: Path, stored: Mapping[str, Tensor], tied: Mapping[str, str]) -> None:
    try:
        save_file(dict(stored), str(path), metadata={"format": "pt", _TIED: json.dumps(tied)})
    except (SafetensorError, OSError) as error:
        size = sum(tensor.nbytes for tensor in stored.values())
        raise CheckpointError(
            f"{path}: cannot write {size} bytes of tensors ({error}); free disk space or choose "
            "another directory"
        ) from error


def _identity(name: str, tensor: Tensor) -> tuple[object, ...]:
    if tensor.numel() == 0:
        return (name,)
    storage = tensor.untyped_storage().data_ptr()
    place = (tensor.device, storage, tensor.storage_offset())
    return (*place, tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _own_memory(tensor: Tensor, used: set[int]) -> Tensor:
    """The same values, contiguous, in memory that no other stored tensor uses."""
    tensor = tensor.detach()
    storage = tensor.untyped_storage()
    is_whole = tensor.is_contiguous() and storage.nbytes() == tensor.nbytes
    if not is_whole or storage.data_ptr() in used:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    used.add(tensor.untyped_storage().data_ptr())
    return tensor


def read_tensors(path: Path | str, *, device: str = "cpu") -> dict[str, Tensor]:
    """The inverse of ``write_tensors``; also reads any other safetensors file.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        with safe_open(str(path), framework="pt", device=device) as file:
            tied = json.loads((file.metadata() or {}).get(_TIED, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        tensors.update({name: tensors[first] for name, first in tied.items()})
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path}: cannot be read as safetensors ({type(error).__name__}: {error}); resume from "
            "another checkpoint"
        ) from error
    return tensors
