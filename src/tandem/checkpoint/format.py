"""The safetensors format, written and digested in one pass, so that neither waits for the other.

Reading is the library's. Which tensors share memory is decided in ``tensors.py``.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from tandem.errors import CheckpointError

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_PIECE = 1 << 23
"""Bytes that are written and digested at a time."""
_ALIGNMENT = 8


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> str:
    """Write contiguous tensors; returns the SHA-256 of the file, which is not yet durable.

    It appears at once: an old file, which the tensors may still be mapped from, stays until then.

    Raises:
        OSError: the file cannot be written.
        CheckpointError: a dtype that the format does not have.
    """
    # Larger elements first: every tensor then lies at a multiple of its element size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    pieces = _pieces(_header(ordered, metadata), [tensor for _, tensor in ordered])
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        digest = _write_pieces(partial, pieces)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return digest


def _write_pieces(path: Path, pieces: Iterator[memoryview]) -> str:
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as digesting:
        for piece in pieces:
            # Both leave the interpreter to other threads while they work on a piece.
            digested = digesting.submit(digest.update, piece)
            rest = piece
            while rest:
                rest = rest[file.write(rest) :]
            digested.result()
    return digest.hexdigest()


def _header(ordered: list[tuple[str, Tensor]], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in ordered:
        if tensor.dtype not in DTYPES:
            allowed = ", ".join(map(str, DTYPES))
            raise CheckpointError(f"{name}: dtype {tensor.dtype}, allowed in a file: {allowed}")
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _pieces(header: bytes, tensors: list[Tensor]) -> Iterator[memoryview]:
    yield memoryview(header)
    for tensor in tensors:
        # A storage that was given to numpy cannot be resized any more, which offload needs.
        host = tensor.detach().cpu()
        content = memoryview((ctypes.c_char * host.nbytes).from_address(host.data_ptr())).cast("B")
        for start in range(0, host.nbytes, _PIECE):
            yield content[start : start + _PIECE]
