"""One thread that steps a core and runs what others ask of it at the token borders in between.

Futures of requests and the way to other processes belong to the backends.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import torch

from tandem.errors import EngineError, TandemError
from tandem.inference.embedded.core import EmbeddedCore, Finished
from tandem.inference.memory import rss_bytes
from tandem.types import LLMRequest

T = TypeVar("T")
Deliver = Callable[[Sequence[Finished]], None]
Die = Callable[[Exception], None]


class CoreLoop:
    """Thread-safe access to a core. ``deliver`` and ``die`` are called from the loop's thread."""

    def __init__(
        self,
        core: EmbeddedCore,
        *,
        deliver: Deliver,
        die: Die,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._deliver = deliver
        self._die = die
        self._changed = threading.Condition()
        self._requests: deque[tuple[int, LLMRequest]] = deque()
        self._aborts: set[int] = set()
        self._calls: deque[_Call[Any]] = deque()
        self._failure: Exception | None = None
        self._is_closing = False
        self._clock = clock
        self._busy_s = 0.0
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self.run, name="tandem-generate", daemon=True)

    def start(self) -> None:
        """Step in a thread of its own."""
        self._thread.start()

    def close(self) -> None:
        """Stop after the current step; requests still running are not delivered any more."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def submit(self, requests: Sequence[tuple[int, LLMRequest]]) -> None:
        """Queue requests in this order; a wrong one is delivered as its error."""
        with self._changed:
            self._refuse_if_ended()
            self._requests.extend(requests)
            self._changed.notify()

    def abort(self, tickets: Sequence[int]) -> None:
        """End requests at the next token border; they are delivered with what they have."""
        with self._changed:
            self._aborts.update(tickets)
            self._changed.notify()

    def call(self, function: Callable[[EmbeddedCore], T]) -> Future[T]:
        """Run ``function`` at the next token border, in the loop's thread."""
        call = _Call(function)
        with self._changed:
            self._refuse_if_ended()
            self._calls.append(call)
            self._changed.notify()
        return call.future

    def stats(self) -> dict[str, Any]:
        """A snapshot that does not wait for the token border."""
        core, counters = self._core, self._core.counters
        return {
            "running": core.num_running,
            "waiting": core.num_waiting + len(self._requests),
            "finished": counters.finished,
            "aborted": counters.aborted,
            "failed": counters.failed,
            "preempted": counters.preempted,
            "tokens": counters.tokens,
            "prefill_tokens": counters.prefill_tokens,
            "shared_tokens": core.shared_tokens,
            "steps": counters.steps,
            "busy_s": self._busy_so_far(),
            "stale_kv_tokens": counters.stale_kv_tokens,
            "cache_bytes": core.cache_bytes,
            "weight_bytes": core.weights.size_bytes,
            "published_weight_bytes": core.weights.published_bytes,
            "recorded_passes": core.num_recorded,
            "paused": core.is_paused,
            "version": core.version.n,
            "threads": torch.get_num_threads(),
            "rss_bytes": rss_bytes(),
        }

    def _busy_so_far(self) -> float:
        """How long the loop had something to do; of that, too, which it does now."""
        with self._changed:
            since = self._busy_since
            return self._busy_s + (0.0 if since is None else self._clock() - since)

    def _refuse_if_ended(self) -> None:
        if self._failure is not None:
            raise EngineError(f"the generation loop died: {self._failure}") from self._failure
        if self._is_closing:
            raise EngineError("the generation backend is closed; start a new one")

    def run(self) -> None:
        """Step in this thread, until ``close`` or an error."""
        try:
            while self._wait():
                self._at_border()
                done = self._core.step()
                if done:
                    self._deliver(done)
        except Exception as error:
            with self._changed:
                self._failure = error
            self._die(error)
        finally:
            self._fail_calls()

    def _wait(self) -> bool:
        """Block while there is nothing to do; whether to go on."""
        with self._changed:
            if not self._has_work():
                self._note_busy(False)
                while not self._has_work():
                    self._changed.wait()
            self._note_busy(True)
            return not self._is_closing

    def _has_work(self) -> bool:
        return bool(
            self._is_closing or self._requests or self._aborts or self._calls or self._core.has_work
        )

    def _note_busy(self, is_busy: bool) -> None:
        now = self._clock()
        if self._busy_since is not None:
            self._busy_s += now - self._busy_since
        self._busy_since = now if is_busy else None

    def _at_border(self) -> None:
        """Take in what was asked since the last border: requests first, so that a call (a pause,
        new weights) and an abort see what was submitted before them."""
        with self._changed:
            requests, self._requests = self._requests, deque()
            aborts, self._aborts = self._aborts, set()
            calls, self._calls = self._calls, deque()
        done = []
        for ticket, request in requests:
            try:
                self._core.add(ticket, request)
            except TandemError as error:
                self._core.counters.failed += 1
                done.append(Finished(ticket, error))
        if aborts:
            done += self._core.abort(aborts)
        if done:
            self._deliver(done)
        for call in calls:
            call.run(self._core)

    def _fail_calls(self) -> None:
        with self._changed:
            self._is_closing = True
            calls, self._calls = self._calls, deque()
        for call in calls:
            if call.future.set_running_or_notify_cancel():
                call.future.set_exception(
                    EngineError(f"the generation backend ended: {self._failure or 'closed'}")
                )


class _Call(Generic[T]):
    """A function to run on the core, and where its result goes."""

    def __init__(self, function: Callable[[EmbeddedCore], T]) -> None:
        self.future: Future[T] = Future()
        self._function = function

    def run(self, core: EmbeddedCore) -> None:
        """Errors that are not our own go to the future and end the loop."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._function(core)
        except TandemError as error:
            self.future.set_exception(error)
        except Exception as error:
            self.future.set_exception(error)
            raise
        else:
            self.future.set_result(result)
