"""Time that a test can own: the real clock and one that moves only when told."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
from concurrent.futures import Future
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since some fixed moment."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class RealClock:
    def now(self) -> float:
        return time.perf_counter()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class VirtualClock:
    """Moves by ``advance`` only; sleepers may sit on any event loop of any thread."""

    def __init__(self) -> None:
        self._now = 0.0
        self._changed = threading.Condition()
        self._sleepers: list[tuple[float, int, Future[None]]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        future: Future[None] = Future()
        with self._changed:
            heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), future))
            self._changed.notify_all()
        await asyncio.wrap_future(future)

    def advance(self, seconds: float) -> None:
        """Wake everyone whose time has come, earliest first."""
        due = []
        with self._changed:
            self._now += seconds
            while self._sleepers and self._sleepers[0][0] <= self._now:
                due.append(heapq.heappop(self._sleepers)[2])
        for future in due:
            if future.set_running_or_notify_cancel():
                future.set_result(None)

    def wait_sleepers(self, count: int, timeout_s: float) -> bool:
        """Block this thread until ``count`` are asleep; whether they are."""

        def enough() -> bool:
            return sum(not future.cancelled() for *_, future in self._sleepers) >= count

        with self._changed:
            return self._changed.wait_for(enough, timeout_s)
