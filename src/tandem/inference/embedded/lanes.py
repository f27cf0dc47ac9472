"""The running sequences as arrays, one row each, compact from row 0.

Plain storage: index t of every per-token array speaks about token t of prompt plus completion.
Which token is drawn and when a sequence ends is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tandem.inference.embedded.requests import Job
from tandem.inference.embedded.sampler import Drawn

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]

_NO_STOP = -1
_PER_TOKEN = ("tokens", "logprobs", "raw_logprobs", "versions", "times")
_PER_ROW = ("_lengths", "_prompt_lengths", "_limits", "_cached", "_blocks")


@dataclass(frozen=True, slots=True)
class Made:
    """What a sequence has generated so far, one entry a token."""

    tokens: Int64s
    logprobs: Float32s
    raw_logprobs: Float32s
    versions: Int64s
    times: npt.NDArray[np.float64]


class Lanes:
    """``cached[i]`` tokens of row i have their keys and values in the cache, ``blocks[i]`` blocks
    of it are set apart for the row."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.tokens = np.zeros((0, 0), dtype=np.int64)
        self.logprobs = np.zeros((0, 0), dtype=np.float32)
        self.raw_logprobs = np.zeros((0, 0), dtype=np.float32)
        self.versions = np.zeros((0, 0), dtype=np.int64)
        self.times = np.zeros((0, 0), dtype=np.float64)
        self._lengths = np.zeros(0, dtype=np.int64)
        self._prompt_lengths = np.zeros(0, dtype=np.int64)
        self._limits = np.zeros(0, dtype=np.int64)
        self._cached = np.zeros(0, dtype=np.int64)
        self._blocks = np.zeros(0, dtype=np.int64)
        self.stop_ids = np.zeros((0, 0), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.jobs)

    @property
    def lengths(self) -> Int64s:
        return self._lengths[: len(self)]

    @property
    def prompt_lengths(self) -> Int64s:
        return self._prompt_lengths[: len(self)]

    @property
    def limits(self) -> Int64s:
        return self._limits[: len(self)]

    @property
    def cached(self) -> Int64s:
        return self._cached[: len(self)]

    @property
    def blocks(self) -> Int64s:
        return self._blocks[: len(self)]

    def sequence(self, row: int) -> Int64s:
        """Prompt and completion of a row so far."""
        return self.tokens[row, : self._lengths[row]]

    def made(self, row: int) -> Made:
        """A copy of what a row has generated."""
        new = slice(int(self._prompt_lengths[row]), int(self._lengths[row]))
        return Made(**{name: getattr(self, name)[row, new].copy() for name in _PER_TOKEN})

    def add(self, jobs: Sequence[Job], made: Sequence[Made | None]) -> None:
        """Append rows that hold the prompts and what was generated before, nothing cached."""
        first = len(self)
        sizes = [0 if part is None else len(part.tokens) for part in made]
        longest = max(job.prompt_length + size for job, size in zip(jobs, sizes, strict=True))
        self._grow(first + len(jobs), longest + 1)
        self.jobs.extend(jobs)
        for row, (job, part, size) in enumerate(zip(jobs, made, sizes, strict=True), first):
            start = job.prompt_length
            self.tokens[row, :start] = job.request.input_ids
            if part is not None:
                for name in _PER_TOKEN:
                    getattr(self, name)[row, start : start + size] = getattr(part, name)
            self._prompt_lengths[row] = start
            self._lengths[row] = start + size
            self._limits[row] = job.limit
            self._cached[row] = self._blocks[row] = 0
        self._set_stop_ids()

    def append(self, drawn: Drawn, version: int, now: float) -> None:
        """Add a token to each of the first rows, as many as were drawn; all of them are cached."""
        n = len(drawn.ids)
        self._grow(len(self), int(self._lengths[:n].max()) + 1)
        rows, at = np.arange(n), self._lengths[:n]
        self._cached[:n] = at
        self.tokens[rows, at] = drawn.ids
        self.logprobs[rows, at] = drawn.logprobs
        if drawn.raw_logprobs is not None:
            self.raw_logprobs[rows, at] = drawn.raw_logprobs
        self.versions[rows, at] = version
        self.times[rows, at] = now
        self._lengths[:n] += 1

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, in this order."""
        order = np.array(rows, dtype=np.int64)
        for name in (*_PER_TOKEN, *_PER_ROW):
            array = getattr(self, name)
            array[: len(order)] = array[order]
        self.jobs = [self.jobs[row] for row in rows]
        self._set_stop_ids()

    def _set_stop_ids(self) -> None:
        width = max((len(job.sampling.stop_ids) for job in self.jobs), default=0) or 1
        self.stop_ids = np.full((len(self), width), _NO_STOP, dtype=np.int64)
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
