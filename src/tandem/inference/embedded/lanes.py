"""The running sequences as arrays, one row each, compact from row 0.

Plain storage: index t of every per-token array speaks about token t of prompt plus completion.
Which token is drawn and when a sequence ends is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tandem.inference.embedded.requests import Job

_PAD_STOP = -1
_PER_TOKEN = ("tokens", "logprobs", "versions", "times")
_PER_ROW = ("_lengths", "_prompt_lengths", "_limits", "_cached")


class Lanes:
    """``cached[i]`` tokens of row i have their keys and values in the cache."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.tokens = np.zeros((0, 0), dtype=np.int64)
        self.logprobs = np.zeros((0, 0), dtype=np.float32)
        self.versions = np.zeros((0, 0), dtype=np.int64)
        self.times = np.zeros((0, 0), dtype=np.float64)
        self._lengths = np.zeros(0, dtype=np.int64)
        self._prompt_lengths = np.zeros(0, dtype=np.int64)
        self._limits = np.zeros(0, dtype=np.int64)
        self._cached = np.zeros(0, dtype=np.int64)
        self.stop_ids = np.zeros((0, 0), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.jobs)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return self._lengths[: len(self)]

    @property
    def prompt_lengths(self) -> npt.NDArray[np.int64]:
        return self._prompt_lengths[: len(self)]

    @property
    def limits(self) -> npt.NDArray[np.int64]:
        return self._limits[: len(self)]

    @property
    def cached(self) -> npt.NDArray[np.int64]:
        return self._cached[: len(self)]

    def add(self, jobs: Sequence[Job]) -> None:
        """Append rows that hold the prompts."""
        first = len(self)
        self._grow(first + len(jobs), max(job.prompt_length for job in jobs) + 1)
        self.jobs.extend(jobs)
        for row, job in enumerate(jobs, first):
            length = job.prompt_length
            self.tokens[row, :length] = job.request.input_ids
            self._lengths[row] = self._prompt_lengths[row] = length
            self._limits[row] = job.limit
            self._cached[row] = 0
        self._set_stop_ids()

    def append(
        self,
        ids: npt.NDArray[np.int64],
        logprobs: npt.NDArray[np.float32],
        version: int,
        now: float,
    ) -> None:
        """Add one token to every row."""
        self._grow(len(self), int(self.lengths.max()) + 1)
        rows, at = np.arange(len(self)), self.lengths
        self.cached[:] = at
        self.tokens[rows, at] = ids
        self.logprobs[rows, at] = logprobs
        self.versions[rows, at] = version
        self.times[rows, at] = now
        self.lengths[:] += 1

    def remove(self, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """Drop rows; rows from the end fill the holes. Returns the moves (sources, targets)."""
        gone = set(rows)
        left = len(self) - len(gone)
        targets = [row for row in sorted(gone) if row < left]
        sources = [row for row in range(left, len(self)) if row not in gone]
        for name in (*_PER_TOKEN, *_PER_ROW):
            array = getattr(self, name)
            array[targets] = array[sources]
        for source, target in zip(sources, targets, strict=True):
            self.jobs[target] = self.jobs[source]
        del self.jobs[left:]
        if self.jobs:
            self._set_stop_ids()
        return sources, targets

    def _set_stop_ids(self) -> None:
        width = max(1, *(len(job.sampling.stop_ids) for job in self.jobs), 1)
        self.stop_ids = np.full((len(self), width), _PAD_STOP, dtype=np.int64)
        for row, job in enumerate(self.jobs):
            self.stop_ids[row, : len(job.sampling.stop_ids)] = job.sampling.stop_ids

    def _grow(self, rows: int, length: int) -> None:
        old_rows, old_length = self.tokens.shape
        if rows <= old_rows and length <= old_length:
            return
        shape = (
            max(rows, 2 * old_rows) if rows > old_rows else old_rows,
            max(length, 2 * old_length) if length > old_length else old_length,
        )
        for name in _PER_TOKEN:
            old = getattr(self, name)
            new = np.zeros(shape, dtype=old.dtype)
            new[:old_rows, :old_length] = old
            setattr(self, name, new)
        for name in _PER_ROW:
            new = np.zeros(shape[0], dtype=np.int64)
            new[:old_rows] = getattr(self, name)
            setattr(self, name, new)
