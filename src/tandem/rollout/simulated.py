"""A runtime in one thread on a virtual clock: the same run again, event by event, at any speed.

Whoever waits makes the event loop go on; when nothing is due the clock jumps to the next timer. So
the executor, the ledger, the journal and the workflows are the real ones, and a whole asynchronous
run is a function of what its timers are set to. Code that starts threads or looks at another clock
does not belong in such a run. What happens in it is decided by whoever simulates.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from types import TracebackType
from typing import Any, Literal

from tandem.rollout.runtime import Runtime


class VirtualLoop(asyncio.AbstractEventLoop):
    """Callbacks in the order of their time, then of their making. ``num_events`` counts them.

    ``before_event`` is called outside of any callback; what it raises ends the run as a kill would:
    no task and no callback sees it.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self.num_events = 0
        self.before_event: Callable[[], None] | None = None
        self._now = start_s
        self._num_timers = 0
        self._ready: deque[_Call] = deque()
        self._timers: list[tuple[float, int, _Call]] = []
        self._failure: BaseException | None = None

    def time(self) -> float:
        return self._now

    def get_debug(self) -> bool:
        return False

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, **options: Any
    ) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, name=name, **options)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        call = _Call(self._now, callback, args, context)
        self._ready.append(call)
        return call

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        call = _Call(when, callback, args, context)
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, call))
        return call

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """What a callback raises ends the simulation; nothing is only logged."""
        error = context.get("exception")
        self._failure = error or RuntimeError(context["message"])

    def advance(self, until: float, is_done: Callable[[], bool] = lambda: False) -> None:
        """Go on until ``is_done`` or, the clock then showing that, the time is ``until``."""
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            while not is_done() and self._step(until):
                pass
        finally:
            asyncio._set_running_loop(before)

    def abandon(self) -> None:
        """End without running anything more, as a kill does; tasks do not hear of it."""
        self._ready.clear()
        self._timers.clear()
        for task in asyncio.all_tasks(self):
            coroutine = task.get_coro()
            if coroutine is not None:
                coroutine.close()

    def _step(self, until: float) -> bool:
        if not self._ready and not self._wind(until):
            return False
        call = self._ready.popleft()
        if call.is_cancelled:
            return True
        if self.before_event is not None:
            self.before_event()
        self.num_events += 1
        call.context.run(call.callback, *call.args)
        if self._failure is not None:
            raise self._failure
        return True

    def _wind(self, until: float) -> bool:
        """Put the next timer's callback in the queue; False: none is due before ``until``."""
        timers = self._timers
        while timers and timers[0][2].is_cancelled:
            heapq.heappop(timers)
        if not timers or timers[0][0] > until:
            self._now = max(self._now, until)
            return False
        when, _, call = heapq.heappop(timers)
        self._now = max(self._now, when)
        self._ready.append(call)
        return True


class _Call(asyncio.TimerHandle):
    """A callback in the queue or on a timer, without what debugging would need."""

    __slots__ = ("args", "callback", "context", "is_cancelled", "time")

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: Context | None,
    ) -> None:
        self.time = when
        self.callback = callback
        self.args = args
        self.context = context or copy_context()
        self.is_cancelled = False

    def __repr__(self) -> str:
        return f"<call of {self.callback!r} at {self.time:g}>"

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self.time


class SimulatedCondition(threading.Condition):
    """A lock that one thread needs not take; waiting for it makes the event loop go on."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._events = loop
        self._is_notified = False

    def __enter__(self) -> bool:
        return True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> Literal[True]:
        return True

    def release(self) -> None:
        return None

    def notify(self, n: int = 1) -> None:
        self._is_notified = True

    def notify_all(self) -> None:
        self._is_notified = True

    def wait(self, timeout: float | None = None) -> bool:
        self._is_notified = False
        until = float("inf") if timeout is None else self._events.time() + timeout
        self._events.advance(until, lambda: self._is_notified)
        return self._is_notified

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until = float("inf") if timeout is None else self._events.time() + timeout
        self._events.advance(until, lambda: bool(predicate()))
        return predicate()


class SimulatedRuntime(Runtime):
    """Everything in the thread that calls; ``start_s`` is where the clock begins."""

    def __init__(self, start_s: float = 0.0) -> None:
        # What a simulation does not do (sockets, signals, processes) raises NotImplementedError.
        self.events = VirtualLoop(start_s)  # type: ignore[abstract]
        self.lock = SimulatedCondition(self.events)
        self._is_running = False

    def condition(self) -> SimulatedCondition:
        return SimulatedCondition(self.events)

    def now(self) -> float:
        return self.events.time()

    async def sleep(self, seconds: float) -> None:
        """Makes this a clock of ``inference.clock`` too."""
        await asyncio.sleep(seconds)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self.events

    @property
    def is_running(self) -> bool:
        return self._is_running

    def start(self, on_exit: Callable[[BaseException], None]) -> None:
        self._is_running = True

    def call_soon(self, function: Callable[[], object]) -> None:
        self.events.call_soon(function)

    def flush(self, timeout_s: float) -> bool:
        passed: list[bool] = []
        self.events.call_soon(passed.append, True)
        self.events.advance(self.now() + timeout_s, lambda: bool(passed))
        return bool(passed)

    def stop(self, last: Coroutine[Any, Any, None], timeout_s: float) -> None:
        task = self.events.create_task(last)
        self.events.advance(self.now() + timeout_s, task.done)
        self._is_running = False

    def pass_time(self, seconds: float) -> None:
        """What a trainer does while episodes run."""
        self.events.advance(self.now() + seconds)
