"""Prefixes across requests: what a row takes from the prefix store and what it leaves there.

What rows of one pass share among themselves is planned in ``plan``.
"""

from __future__ import annotations

from collections.abc import Iterable

from tandem.inference.embedded.lanes import Lanes
from tandem.inference.embedded.requests import Job
from tandem.models.cache import BLOCK, KVCache, PrefixStore, block_keys
from tandem.types import WeightVersion


class PrefixSharing:
    """A row holds its blocks in the store until it leaves, so that its siblings find them."""

    def __init__(self, cache: KVCache, capacity: int) -> None:
        self._cache = cache
        self._store = PrefixStore(capacity)
        self.loaded_tokens = 0

    @property
    def size_bytes(self) -> int:
        return self._store.size_bytes

    def load(self, lanes: Lanes, first: int, version: WeightVersion) -> None:
        """Fill the beginnings of the new rows from ``first`` on, except where another running row
        can give more."""
        if not self._store.pool.num_held + self._store.pool.num_idle:
            return
        running = {job.prefixes[-1][1] for job in lanes.jobs[:first] if not job.is_mixed}
        for row in range(first, len(lanes)):
            job = lanes.jobs[row]
            keys = _keys(lanes, row, int(lanes.lengths[row]) - 1)
            blocks = self._store.match(version, keys)
            count = len(blocks) * BLOCK
            if count > (job.prompt_length if job.prefixes[-1][1] in running else 0):
                if job.needs_prompt_logprobs:
                    continue
                self._store.pool.hold(blocks)
                self._store.load(self._cache, row, blocks)
                job.held = blocks
                lanes.cached[row] = count
                self.loaded_tokens += count
            running.add(job.prefixes[-1][1])

    def file(self, lanes: Lanes, rows: Iterable[int], version: WeightVersion) -> None:
        """Keep the full blocks of rows, unless older weights had a part in them."""
        if not self._store.pool.capacity:
            return
        for row in rows:
            job = lanes.jobs[row]
            if not job.is_mixed:
                keys = _keys(lanes, row, int(lanes.cached[row]))
                before, job.held = job.held, self._store.file(self._cache, row, version, keys)
                self._store.pool.release(before)

    def release(self, jobs: Iterable[Job]) -> None:
        """These do not run any more."""
        for job in jobs:
            self._store.pool.release(job.held)
            job.held = []

    def invalidate(self) -> None:
        """Forget everything: other weights serve from here on."""
        self._store.pool.clear()

    def check(self, lanes: Lanes) -> None:
        """Assert that exactly the running rows hold blocks."""
        self._store.pool.check(job.held for job in lanes.jobs)


def _keys(lanes: Lanes, row: int, tokens: int) -> list[bytes]:
    known = [key for count, key in lanes.jobs[row].prefixes if count % BLOCK == 0]
    return block_keys(lanes.tokens[row, :tokens], known[: tokens // BLOCK])
