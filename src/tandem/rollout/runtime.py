"""Where episodes run, where callers wait, and by which clock: real threads and real time.

A simulation has both in one thread and a clock that jumps (``simulated``). What runs and what is
waited for is decided in ``loop`` and ``executor``.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)


class Runtime(ABC):
    """One event loop for episodes, and the lock that its users share with their callers."""

    lock: threading.Condition
    """Guards what episodes and callers share; re-entrant. Callers wait for it to be notified."""

    @abstractmethod
    def condition(self) -> threading.Condition:
        """Another condition under the same lock, for who is to be woken more rarely."""

    @abstractmethod
    def now(self) -> float:
        """Seconds on the event loop's clock; never goes back."""

    @property
    @abstractmethod
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop; only while it runs."""

    @property
    @abstractmethod
    def is_running(self) -> bool: ...

    @abstractmethod
    def start(self, on_exit: Callable[[BaseException], None]) -> None:
        """Start the event loop. ``on_exit`` gets what asyncio lets out of it."""

    @abstractmethod
    def call_soon(self, function: Callable[[], object]) -> None:
        """Run ``function`` in the event loop, soon; from any thread."""

    @abstractmethod
    def flush(self, timeout_s: float) -> bool:
        """Return after everything that the event loop has in its queue now; False: not in time."""

    @abstractmethod
    def stop(self, last: Coroutine[Any, Any, None], timeout_s: float) -> None:
        """Run ``last`` to its end, then end the event loop.

        One that is blocked is left behind after ``timeout_s``.
        """


class ThreadRuntime(Runtime):
    """Episodes in one daemon thread."""

    def __init__(self) -> None:
        self._mutex = threading.RLock()
        self.lock = threading.Condition(self._mutex)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def condition(self) -> threading.Condition:
        return threading.Condition(self._mutex)

    def now(self) -> float:
        return time.monotonic()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None
        return self._loop

    @property
    def is_running(self) -> bool:
        return self._thread is not None

    def start(self, on_exit: Callable[[BaseException], None]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=_run, args=(self._loop, on_exit), name="tandem-rollout", daemon=True
        )
        self._thread.start()

    def call_soon(self, function: Callable[[], object]) -> None:
        assert self._thread is not None
        if threading.get_ident() == self._thread.ident:
            self.loop.call_soon(function)  # without the system call that wakes the loop
        else:
            self.loop.call_soon_threadsafe(function)

    def flush(self, timeout_s: float) -> bool:
        passed = threading.Event()
        self.call_soon(passed.set)
        return passed.wait(timeout_s)

    def stop(self, last: Coroutine[Any, Any, None], timeout_s: float) -> None:
        assert self._thread is not None
        ending = asyncio.run_coroutine_threadsafe(last, self.loop)
        try:
            ending.result(timeout_s + 1.0)
        except TimeoutError:
            log.warning("the rollout thread is left behind: its event loop is blocked")
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(timeout_s)
            self._thread = self._loop = None


def _run(loop: asyncio.AbstractEventLoop, on_exit: Callable[[BaseException], None]) -> None:
    asyncio.set_event_loop(loop)
    while True:
        try:
            loop.run_forever()
            break
        except (KeyboardInterrupt, SystemExit) as error:
            # asyncio lets these two out of the loop; the waiting caller gets them instead.
            on_exit(error)
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
