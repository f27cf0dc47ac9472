"""Both engines in one process: a reused double buffer in ordinary memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tandem.errors import WeightSyncError
from tandem.types import ParamSpec, WeightUpdateMeta
from tandem.weights.bucket import Heed, fill_bucket, plan_bucket, verified_views
from tandem.weights.manifest import Manifest, MemoryLocation, Published


class Buffer:
    """Bytes that either one writer or any number of readers hold.

    ``generation`` counts writes, so that a location handed out before is recognised as outdated.
    """

    def __init__(self, size_bytes: int) -> None:
        self.data = torch.empty(size_bytes, dtype=torch.uint8)
        self.generation = 0
        self._num_readers = 0
        self._lock = threading.Lock()

    def try_write(self) -> bool:
        """Outdate what the buffer holds, unless it is being read."""
        with self._lock:
            if self._num_readers:
                return False
            self.generation += 1
            return True

    @contextmanager
    def reading(self, generation: int) -> Iterator[Tensor]:
        with self._lock:
            if self.generation != generation:
                raise WeightSyncError(
                    "version: the published one was replaced by a newer one before it was read; "
                    "expect and read the newest version"
                )
            self._num_readers += 1
        try:
            yield self.data
        finally:
            with self._lock:
                self._num_readers -= 1


class InprocessSender:
    """Writes versions in turn into two buffers; one still being read is left to its reader."""

    def __init__(self) -> None:
        self._newest: Buffer | None = None
        self._spare: Buffer | None = None

    def write(
        self,
        meta: WeightUpdateMeta,
        specs: Sequence[ParamSpec],
        tensors: Iterable[tuple[str, Tensor]],
    ) -> Published:
        plan = plan_bucket(meta, specs, packed=False)
        buffer, self._spare = self._spare, None
        fits = buffer is not None and buffer.data.numel() >= plan.size_bytes
        if buffer is None or not fits or not buffer.try_write():
            buffer = Buffer(plan.size_bytes)
        manifest = fill_bucket(buffer.data, plan, tensors)
        self._spare, self._newest = self._newest, buffer
        return Published(manifest, MemoryLocation(buffer, buffer.generation))

    def release(self) -> None:
        self._newest = self._spare = None


@contextmanager
def open_memory(
    location: MemoryLocation, manifest: Manifest, heed: Heed
) -> Iterator[dict[str, Tensor]]:
    with location.buffer.reading(location.generation) as data:
        yield verified_views(data, manifest, heed)
