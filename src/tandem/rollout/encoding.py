"""Rows of an episode as bytes and back: what the trajectory store keeps of them.

The format is that of a safetensors file, which other programs can read. Whole numbers of tokens
take four bytes; what follows from the episode itself (``episode_ids``, ``attempt``) is left out.
"""

from __future__ import annotations

import json
from functools import lru_cache
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

_Entry = tuple[str, str, tuple[int, ...], int]
"""Name, dtype, shape and size in bytes of one tensor."""


def pack_rows(rows: EpisodeRows) -> bytes:
    """The bytes of what ``check_rows`` returned.

    Raises:
        DataError: a tensor of a kind that cannot be stored.
    """
    entries: list[_Entry] = []
    parts: list[bytes] = []
    for name, tensor in sorted(rows.with_columns(PER_ROW).items()):
        kind, data = _encode(name, tensor)
        entries.append((name, kind, tuple(tensor.shape), len(data)))
        parts.append(data)
    return b"".join([_header(tuple(entries)), *parts])


def _encode(name: str, tensor: Any) -> tuple[str, bytes]:
    kind = _NAMES.get(getattr(tensor, "dtype", None))  # type: ignore[arg-type]
    if kind is None or tensor.is_nested:
        raise DataError(
            f"{name}: rows hold a {type(tensor).__name__} of {getattr(tensor, 'dtype', None)}, "
            f"allowed: padded tensors of {', '.join(map(str, _NAMES))}"
        )
    if kind == "BF16":  # numpy has none
        return kind, tensor.detach().cpu().contiguous().view(torch.int16).numpy().tobytes()
    array = tensor.numpy(force=True)
    if kind == "I64" and name in _NARROW:
        narrow = array.astype(np.int32)
        if not np.count_nonzero(narrow != array):
            return "I32", narrow.tobytes()
    return kind, array.tobytes()


@lru_cache(maxsize=4096)
def _header(entries: tuple[_Entry, ...]) -> bytes:
    record, start = {}, 0
    for name, kind, shape, size in entries:
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
