"""Rows of an episode as bytes and back: what the trajectory store keeps of them.

The format is that of a safetensors file, which other programs can read. Whole numbers of tokens
take four bytes; what follows from the episode itself (``episode_ids``, ``attempt``) is left out.
"""

from __future__ import annotations

import json
from functools import lru_cache
from struct import Struct
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from tensordict import TensorDict

from tandem.data.batch import KEYS
from tandem.errors import DataError, StoreError
from tandem.rollout.rows import PER_ROW, EpisodeRows

_NARROW = frozenset(
    name for name, spec in KEYS.items() if spec.dtype == torch.int64 and spec.shape == "BT"
)
_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}

_PACKED = {torch.bool: Struct("<?"), torch.int64: Struct("<q"), torch.float32: Struct("<f")}
_LEFT_OUT = {name: (_NAMES[dtype], _PACKED[dtype].pack) for name, dtype in PER_ROW.items()}


def pack_rows(rows: EpisodeRows) -> bytes:
    """The bytes of what ``check_rows`` returned.

    Raises:
        DataError: a tensor of a kind that cannot be stored.
    """
    entries: list[Any] = []
    parts: list[bytes] = []
    tensors = rows.tensors
    for name in _order(tuple(tensors)):
        if name in tensors:
            kind, shape, data = _encode(name, tensors[name], rows.arrays.get(name))
        else:
            kind, shape, data = _left_out(name, rows)
        entries += name, kind, shape, len(data)
        parts.append(data)
    return b"".join([_header(tuple(entries)), *parts])


@lru_cache
def _order(names: tuple[str, ...]) -> list[str]:
    """Of all columns, with those that a workflow may leave out."""
    return sorted({*names, *PER_ROW})


def _left_out(name: str, rows: EpisodeRows) -> tuple[str, tuple[int, ...], bytes]:
    kind, pack = _LEFT_OUT[name]
    if name == "sample_ids":
        data = np.arange(rows.num_rows, dtype=np.int64).tobytes()
    else:
        data = pack(rows.value_of(name)) * rows.num_rows
    return kind, (rows.num_rows,), data


def _encode(
    name: str, tensor: Any, array: np.ndarray[Any, Any] | None
) -> tuple[str, tuple[int, ...], bytes]:
    """Kind, shape and bytes; ``array`` is the tensor as one, if somebody made it before."""
    kind = _NAMES.get(getattr(tensor, "dtype", None))  # type: ignore[arg-type]
    if kind is None or tensor.is_nested:
        raise DataError(
            f"{name}: rows hold a {type(tensor).__name__} of {getattr(tensor, 'dtype', None)}, "
            f"allowed: padded tensors of {', '.join(map(str, _NAMES))}"
        )
    if kind == "BF16":  # numpy has none
        array = tensor.detach().cpu().contiguous().view(torch.int16).numpy()
    elif array is None:
        array = tensor.numpy(force=True)
    data = array.tobytes()
    if kind == "I64" and name in _NARROW:
        narrow = array.astype(np.int32)
        if narrow.astype(np.int64).tobytes() == data:
            return "I32", narrow.shape, narrow.tobytes()
    return kind, array.shape, data


@lru_cache(maxsize=4096)
def _header(entries: tuple[Any, ...]) -> bytes:
    """Of name, dtype, shape and size in bytes of every tensor, one after the other: a tuple of
    tuples takes longer to look up."""
    record, start = {}, 0
    for name, kind, shape, size in zip(*[iter(entries)] * 4, strict=True):
        record[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(record, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def unpack_rows(data: bytes, *, episode_id: int, attempt: int) -> TensorDict:
    """The rows as they were.

    Raises:
        StoreError: ``data`` are not rows.
    """
    try:
        tensors = load(data)
        num_rows = len(tensors["input_ids"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise StoreError(
            f"rows of episode {episode_id} attempt {attempt} are damaged ({error!r}); move the "
            "store away and resume: what it held runs again"
        ) from error
    for name in _NARROW & tensors.keys():
        tensors[name] = tensors[name].to(torch.int64)
    for name, value in (("episode_ids", episode_id), ("attempt", attempt)):
        tensors[name] = torch.full((num_rows,), value, dtype=torch.int64)
    return TensorDict(tensors, batch_size=[num_rows])
