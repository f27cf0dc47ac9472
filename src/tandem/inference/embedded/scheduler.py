"""Who runs: first come, first served, as far as rows and cache space go.

When running sequences outgrow the cache, the one that came last goes back to the head of the queue
and is computed again later. What a forward pass does with the running ones is planned in ``plan``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from tandem.inference.embedded.lanes import Lanes, Made
from tandem.inference.embedded.requests import Job
from tandem.models.cache import BLOCK, num_blocks

TOGETHER = 8
PATIENCE = 16
"""Once all rows were taken, requests wait until one row in ``TOGETHER`` is free, or for
``PATIENCE`` passes: a pass that begins new requests costs as much as a step more, for one or many.
"""


@dataclass(slots=True)
class Waiting:
    """A queued request, with what it had generated if it was running before."""

    job: Job
    made: Made | None = None

    @property
    def length(self) -> int:
        return self.job.prompt_length + (0 if self.made is None else len(self.made.tokens))


class Scheduler:
    """Counts blocks of the rows; ``free_blocks`` plus those of all rows is ``capacity``."""

    def __init__(self, *, max_rows: int, capacity: int) -> None:
        self.capacity = capacity
        self.free_blocks = capacity
        self._max_rows = max_rows
        self._queue: deque[Waiting] = deque()
        self._passes_held = 0

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, job: Job) -> None:
        self._queue.append(Waiting(job))

    @property
    def tickets(self) -> list[int]:
        return [item.job.ticket for item in self._queue]

    def remove(self, tickets: set[int]) -> list[Waiting]:
        """Take these requests out of the queue."""
        if not tickets:
            return []
        gone = [item for item in self._queue if item.job.ticket in tickets]
        self._queue = deque(item for item in self._queue if item.job.ticket not in tickets)
        return gone

    def admit(self, lanes: Lanes) -> bool:
        """Move requests from the queue into rows while there is room; whether any moved.

        One free block for every running row is left over, so that a newcomer is not sent back as
        soon as the others grow.
        """
        admitted: list[Waiting] = []
        if self._holds(lanes):
            return False
        while self._queue and len(lanes) + len(admitted) < self._max_rows:
            running = len(lanes) + len(admitted)
            needed = num_blocks(self._queue[0].length)
            if needed + running > self.free_blocks:
                break
            self.free_blocks -= needed
            admitted.append(self._queue.popleft())
        if not admitted:
            return False
        first = len(lanes)
        lanes.add([item.job for item in admitted], [item.made for item in admitted])
        lanes.blocks[first:] = [num_blocks(item.length) for item in admitted]
        return True

    def _holds(self, lanes: Lanes) -> bool:
        """Whether the queue waits for more rows to become free."""
        free = self._max_rows - len(lanes)
        if free == 0:
            self._passes_held = 1
        elif self._passes_held:
            self._passes_held += 1
            if free >= max(1, self._max_rows // TOGETHER) or self._passes_held > PATIENCE:
                self._passes_held = 0
        return self._passes_held > 0

    def grow(self, lanes: Lanes) -> list[int]:
        """Set blocks apart for every row's tokens; the rows to ``preempt`` first, if any."""
        lack = -(-lanes.lengths // BLOCK) - lanes.blocks
        missing = int(lack.sum()) - self.free_blocks
        if missing <= 0:
            lanes.blocks[:] += lack
            self.free_blocks -= int(lack.sum())
            return []
        preempted = []
        for row in sorted(range(len(lanes)), key=lambda i: -lanes.jobs[i].arrival):
            preempted.append(row)
            missing -= int(lack[row] + lanes.blocks[row])
            if missing <= 0:
                break
        return preempted

    def preempt(self, lanes: Lanes, rows: list[int]) -> None:
        """Queue rows again, before everybody else; the caller removes them from ``lanes``."""
        for row in sorted(rows, key=lambda i: -lanes.jobs[i].arrival):
            self._queue.appendleft(Waiting(lanes.jobs[row], lanes.made(row)))

    def release(self, lanes: Lanes, rows: list[int]) -> None:
        """Give the blocks of rows back."""
        self.free_blocks += int(lanes.blocks[np.array(rows, dtype=np.int64)].sum())

    def check(self, lanes: Lanes) -> None:
        """Assert that no block is lost or counted twice."""
        assert self.free_blocks + int(lanes.blocks.sum()) == self.capacity
        assert (lanes.blocks * BLOCK >= lanes.cached).all()
