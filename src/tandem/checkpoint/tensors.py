"""Named tensors in one safetensors file. Values and identity survive: tied tensors come back tied.

Numbers, strings and nested state belong to ``state.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tandem.checkpoint.files import write_file
from tandem.errors import CheckpointError

_TIED = "tandem.tied"


def write_tensors(path: Path | str, tensors: Mapping[str, Tensor]) -> None:
    """Write ``tensors``; names that are the same memory are written once and tied again on reading.

    Inside a staging with a background writer they are copied, and written when the block has ended.

    Raises:
        CheckpointError: the file cannot be written, or the format has no word for a dtype.
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
    write_file(path, stored, {"format": "pt", _TIED: json.dumps(tied)})


def _identity(name: str, tensor: Tensor) -> tuple[object, ...]:
    if tensor.numel() == 0:
        return (name,)
    storage = tensor.untyped_storage().data_ptr()
    place = (tensor.device, storage, tensor.storage_offset())
    return (*place, tuple(tensor.shape), tensor.stride(), tensor.dtype)


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
