"""Versions in files that are mapped, never copied: what shared memory and disk have in common."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tandem.errors import WeightSyncError
from tandem.weights.bucket import Heed, Plan, fill_bucket, verified_views
from tandem.weights.manifest import FileLocation, Manifest


def fill_file(
    file: int, plan: Plan, tensors: Iterable[tuple[str, Tensor]], *, header: bytes = b""
) -> Manifest:
    """Write ``header`` and the bucket into an open file, which ends where the bucket ends.

    Raises:
        WeightSyncError: the stream differs from the specs.
        OSError: the device is full.
    """
    size = len(header) + plan.size_bytes
    _reserve(file, max(size, 1))
    # Never closed by hand: the mapping ends with the last tensor that points into it.
    mapped = mmap.mmap(file, max(size, 1))
    mapped[: len(header)] = header
    data = torch.frombuffer(mapped, dtype=torch.uint8)
    return fill_bucket(data[len(header) : size], plan, tensors)


def _reserve(file: int, size: int) -> None:
    """Make the file ``size`` bytes long, of real space: a write to a hole of a full device kills
    the process with SIGBUS instead of raising."""
    os.ftruncate(file, size)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)


@contextmanager
def open_file(
    location: FileLocation, manifest: Manifest, heed: Heed
) -> Iterator[dict[str, Tensor]]:
    """Map a published file. The shared lock keeps its sender from reusing it meanwhile."""
    path, start = location["path"], location["data_start"]
    replaced = WeightSyncError(
        f"weight version {manifest.version}: {path} is gone or was replaced by a newer version "
        "before it was read; expect and read the newest version"
    )
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        raise replaced from None
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            is_same = os.path.samestat(os.fstat(file), os.stat(path))
        except (BlockingIOError, FileNotFoundError):
            raise replaced from None
        if not is_same:
            raise replaced
        yield verified_views(_map(file, start, manifest, path), manifest, heed)
    finally:
        os.close(file)


def _map(file: int, start: int, manifest: Manifest, path: str) -> Tensor:
    size = os.fstat(file).st_size
    if size < start + manifest.size_bytes:
        raise WeightSyncError(
            f"weight version {manifest.version}: {path} has {size} bytes, published: "
            f"{start + manifest.size_bytes}; publish the version again"
        )
    # Copy-on-write: a reader that writes into its tensors never changes what others read.
    mapped = mmap.mmap(file, size, access=mmap.ACCESS_COPY)
    return torch.frombuffer(mapped, dtype=torch.uint8)[start:]
