"""A safetensors file as one piece of memory: filled by copies, written past the page cache.

The kernel would copy the bytes once more, and make room for them first; both take longer than the
disk. Which tensors share memory, and reading, belong to ``tensors.py``.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tandem.errors import CheckpointError

_PAGE = 4096
"""Bytes; writing past the page cache takes whole pages at addresses that are whole pages."""
_PIECE = 1 << 22
"""Bytes of one write."""
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class FileImage:
    """The bytes of one file in page-aligned memory; ``views`` are its tensors, behind ``head``."""

    head: bytes
    size: int
    memory: Tensor
    views: dict[str, Tensor]

    def digest(self) -> str:
        """SHA-256 in hexadecimal digits."""
        return hashlib.sha256(self.memory.numpy().data[: self.size]).hexdigest()

    def write(self, path: Path) -> None:
        """Raises OSError; what is written is on the disk only after an fsync."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            _skip_cache(descriptor, True)
            left = self.memory.numpy().data
            while left:
                left = left[_write_piece(descriptor, left[:_PIECE]) :]
            os.ftruncate(descriptor, self.size)
        finally:
            os.close(descriptor)


def image_of(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], kept: FileImage | None = None
) -> FileImage:
    """The file of ``tensors`` as they are now, in the memory of ``kept`` if that has this layout.

    Raises:
        CheckpointError: the format has no word for a dtype.
    """
    head, offsets = _layout(tensors, metadata)
    image = kept if kept is not None and kept.head == head else _empty(head, tensors, offsets)
    with torch.no_grad():
        for name, tensor in tensors.items():
            image.views[name].copy_(tensor)
    return image


def write_images(images: Mapping[Path, FileImage]) -> dict[Path, str]:
    """Write every file, and digest them meanwhile; the digests (SHA-256) of what was written.

    Raises:
        CheckpointError: a file cannot be written.
    """
    largest_first = sorted(images, key=lambda path: images[path].size, reverse=True)
    with ThreadPoolExecutor(2) as pool:
        digests = {path: pool.submit(images[path].digest) for path in largest_first}
        for path in largest_first:
            try:
                images[path].write(path)
            except OSError as error:
                raise CheckpointError(
                    f"{path}: cannot write {images[path].size} bytes of tensors ({error}); free "
                    "disk space or choose another directory"
                ) from error
        return {path: digest.result() for path, digest in digests.items()}


def _layout(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """The header and where each tensor begins after it: wide elements first, so all are aligned."""
    record: dict[str, object] = {"__metadata__": dict(metadata)}
    offsets: dict[str, int] = {}
    end = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)):
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        offsets[name] = begin
        record[name] = {
            "dtype": _dtype(name, tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(record, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _PAGE)
    return len(text).to_bytes(8, "little") + text, offsets


def _dtype(name: str, dtype: torch.dtype) -> str:
    if dtype not in _DTYPES:
        raise CheckpointError(
            f"{name}: dtype {dtype} cannot be written as safetensors, allowed: "
            f"{', '.join(str(known) for known in _DTYPES)}"
        )
    return _DTYPES[dtype]


def _empty(head: bytes, tensors: Mapping[str, Tensor], offsets: Mapping[str, int]) -> FileImage:
    size = len(head) + sum(tensor.nbytes for tensor in tensors.values())
    pinned = any(tensor.device.type == "cuda" for tensor in tensors.values())
    raw = torch.empty(_whole_pages(size) + _PAGE, dtype=torch.uint8, pin_memory=pinned)
    memory = raw[-raw.data_ptr() % _PAGE :][: _whole_pages(size)]
    memory[size:] = 0
    memory.numpy().data[: len(head)] = head
    begin = {name: len(head) + offset for name, offset in offsets.items()}
    views = {
        name: memory[begin[name] : begin[name] + tensor.nbytes]
        .view(tensor.dtype)
        .view(tensor.shape)
        for name, tensor in tensors.items()
    }
    return FileImage(head, size, memory, views)


def _whole_pages(size: int) -> int:
    return math.ceil(size / _PAGE) * _PAGE


def _write_piece(descriptor: int, piece: memoryview) -> int:
    try:
        return os.write(descriptor, piece)
    except OSError as error:
        # A file system may refuse only when it sees the bytes, or after a piece was cut short.
        if error.errno != errno.EINVAL or not _skip_cache(descriptor, False):
            raise
        return os.write(descriptor, piece)


def _skip_cache(descriptor: int, on: bool) -> bool:
    """Turn writing past the page cache on where there is such a thing; whether this changed it."""
    flag = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    wanted = flags | flag if on else flags & ~flag
    if wanted == flags:
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, wanted)
    except OSError as error:
        if not on or error.errno != errno.EINVAL:
            raise
        return False
    return True
