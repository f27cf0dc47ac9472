"""The deadlines of running attempts, on one timer. What follows from one that passes is ``loop``'s.

A timer for each attempt would cost as much as its task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tandem.rollout.runs import Run
from tandem.rollout.runtime import Runtime


class Deadlines:
    """Calls ``expired``, in the rollout thread and without the lock, with every attempt that is
    still here ``timeout_s`` after its start.

    Attempts with the same timeout expire in the order in which they started, so that only the first
    of each queue is ever looked at. ``add`` is called in the rollout thread; all under the lock.
    """

    def __init__(self, runtime: Runtime, expired: Callable[[Run], None]) -> None:
        self._runtime = runtime
        self._expired = expired
        self._queues: dict[float, dict[Run, None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = float("inf")

    def add(self, run: Run) -> None:
        """An attempt that starts now."""
        queue = self._queues.get(run.timeout_s)
        if queue is None:
            queue = self._queues[run.timeout_s] = {}
        queue[run] = None
        if (due_at := _deadline(run)) < self._due_at:
            self._arm(due_at)

    def discard(self, run: Run) -> None:
        """It has ended, or its end is no longer waited for."""
        if (queue := self._queues.get(run.timeout_s)) is not None:
            queue.pop(run, None)

    def clear(self) -> None:
        """The event loop has ended, and its timers with it."""
        self._queues.clear()
        self._timer, self._due_at = None, float("inf")

    def _arm(self, due_at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due_at = due_at
        self._timer = self._runtime.loop.call_at(due_at, self._look)

    def _look(self) -> None:
        with self._runtime.lock:
            self._timer, self._due_at = None, float("inf")
            due = self._take_due(self._runtime.now())
            firsts = [_deadline(next(iter(queue))) for queue in self._queues.values()]
            if firsts:
                self._arm(min(firsts))
        for run in due:
            self._expired(run)

    def _take_due(self, now: float) -> list[Run]:
        due = []
        for timeout_s, queue in list(self._queues.items()):
            while queue and _deadline(run := next(iter(queue))) <= now:
                del queue[run]
                due.append(run)
            if not queue:
                del self._queues[timeout_s]
        return due


def _deadline(run: Run) -> float:
    assert run.started_at is not None
    return run.started_at + run.timeout_s
