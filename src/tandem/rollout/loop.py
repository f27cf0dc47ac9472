"""The rollout thread: runs attempts as asyncio tasks, each with a deadline, and tells their end.

What an end means (states, queues, budgets) is decided by whoever launched the attempt; threads and
clock are the ``runtime``'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

from tandem.errors import EngineError, RolloutError
from tandem.rollout.deadlines import Deadlines
from tandem.rollout.rows import EpisodeRows, check_rows
from tandem.rollout.runs import FATAL, Outcome, Run, Settle
from tandem.rollout.runtime import Runtime, ThreadRuntime
from tandem.rollout.workflow import EpisodeListener
from tandem.store.records import EpisodeRecord

if TYPE_CHECKING:
    from tandem.rollout.engine import InferenceEngine

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0

_CURRENT: ContextVar[Run | None] = ContextVar("tandem_rollout_run", default=None)


class EpisodeLoop:
    """Attempts in the event loop of ``runtime``. ``lock`` guards this and all that users share.

    ``active`` holds the attempts that run and are not settled, ``num_ended`` counts those that
    ended, ``num_late`` the results that came after their attempt was given up. ``fatal`` is what
    every wait must raise. ``enough`` is notified when who waits for episodes should look again, and
    not at every end of one, which would cost more than the episode. ``temperature`` is that of rows
    which name none.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        on_episode: EpisodeListener | None,
        *,
        temperature: float,
        runtime: Runtime | None = None,
    ) -> None:
        self.runtime = runtime or ThreadRuntime()
        self.lock = self.runtime.lock
        self.enough = self.runtime.condition()
        self.now = self.runtime.now
        self.active: set[Run] = set()
        self.num_late = 0
        self.num_ended = 0
        self.fatal: BaseException | None = None
        self._engine = engine
        self._deadlines = Deadlines(self.runtime, self._expire)
        self._on_episode = on_episode
        self._temperature = temperature

    def start(self) -> None:
        """Start the thread. Idempotent."""
        if not self.runtime.is_running:
            self.fatal = None
            self.runtime.start(self.set_fatal)

    def close(self) -> None:
        """Cancel every attempt, end the thread, wake all waits with an error. Idempotent.

        A thread that a workflow or a reward blocks is left behind after ``CLOSE_TIMEOUT_S``.
        """
        if not self.runtime.is_running:
            return
        with self.lock:
            self.set_fatal(EngineError("the inference engine was destroyed"))
            runs = list(self.active)
            for run in runs:
                self._give_up(run)
        self.runtime.stop(_cancel(runs, CLOSE_TIMEOUT_S), CLOSE_TIMEOUT_S)
        with self.lock:
            self._deadlines.clear()

    @property
    def is_running(self) -> bool:
        return self.runtime.is_running

    def set_fatal(self, error: BaseException) -> None:
        with self.lock:
            self.fatal = self.fatal or error
            self.lock.notify_all()
            self.enough.notify_all()

    def raise_if_broken(self) -> None:
        if self.fatal is not None:
            raise self.fatal
        if not self.is_running:
            raise EngineError("the inference engine is not initialised; call initialize() first")

    # attempts

    def call_soon(self, function: Callable[[], object]) -> None:
        """Run ``function`` in the rollout thread, soon."""
        self.runtime.call_soon(function)

    def flush(self, timeout_s: float) -> None:
        """Return after everything that the rollout thread has in its queue now."""
        if not self.runtime.flush(timeout_s):
            raise TimeoutError(
                f"the rollout thread did not answer within {timeout_s:g} s; a workflow or a reward "
                "blocks its event loop"
            )

    def launch(self, run: Run, settle: Settle, reported: Callable[[Run], None]) -> None:
        """Start an attempt; only in the rollout thread, under the lock. ``reported`` comes after
        the listeners."""
        run.started_at, run.settle, run.reported = self.now(), settle, reported
        self.active.add(run)
        self._deadlines.add(run)
        run.task = self.runtime.loop.create_task(self._attempt(run), name=run.episode.uid)
        run.task.add_done_callback(partial(self._ended, run))

    def abandon(self, run: Run) -> None:
        """Give an attempt up: cancel it, ignore its result. Under the lock, from any thread."""
        if not run.settled:
            self._give_up(run)
            if run.task is not None:
                self.call_soon(run.task.cancel)

    def tell(self, run: Run, outcome: Outcome) -> None:
        """Report an end that came from outside. Under the lock, from any thread."""
        if listeners := self._listeners(run):
            record = run.record(*outcome, self.now())
            self.call_soon(lambda: self._report(listeners, record))

    def _listeners(self, run: Run) -> list[EpisodeListener]:
        found = (run.workflow.listener, self._on_episode)
        return [listener for listener in found if listener is not None]

    def _report(self, listeners: Sequence[EpisodeListener], record: EpisodeRecord) -> None:
        try:
            for listener in listeners:
                listener(record)
        except Exception as failure:
            self.set_fatal(failure)

    def stacks(self, limit: int = 20) -> list[tuple[str, list[str]]]:
        """Where the running attempts stand, by name: outermost call first, down to what is awaited.

        May be called from any thread without the lock: it is for when things hang.
        """
        tasks = [(run.name, run.task) for run in list(self.active) if run.task is not None]
        return [(name, _awaits(task.get_coro())) for name, task in tasks[:limit]]

    def note_span(self, span: dict[str, Any]) -> None:
        """Keep what the current attempt did from ``started_at`` (monotonic) on."""
        run = _CURRENT.get()
        if run is not None and run.started_at is not None:
            span["start_s"] = span.pop("started_at") - run.started_at
            run.spans.append(span)

    def uid(self) -> tuple[str, int] | None:
        """Unique name and episode id of the attempt whose task calls; None outside of one."""
        run = _CURRENT.get()
        return None if run is None else (run.episode.uid, run.episode_id)

    def note_request(self) -> None:
        """The engine tells of a request, so that a whole batch can be waited for."""
        run = _CURRENT.get()
        if run is not None and not run.has_requested:
            with self.lock:
                run.has_requested = True
                self.lock.notify_all()

    @contextmanager
    def whole_batch_first(
        self, hold_generation: Callable[[], AbstractContextManager[None]], timeout_s: float
    ) -> Iterator[None]:
        """Hold generation until every attempt started inside has made its first request.

        Only when nothing else runs: then what the first forward pass sees is a function of the
        batch alone. With a smaller ``max_concurrent`` that is its first part.
        """
        with self.lock:
            is_busy = bool(self.active)
        if is_busy:
            yield
            return
        with hold_generation():
            yield
            self.flush(timeout_s)
            with self.lock:
                self.lock.wait_for(self._has_all_requests, timeout_s)
            # The other samples of the last group are in the thread's queue by now.
            self.flush(timeout_s)

    def _has_all_requests(self) -> bool:
        waiting = any(not run.has_requested for run in self.active)
        return self.fatal is not None or not waiting

    async def _attempt(self, run: Run) -> EpisodeRows | None:
        _CURRENT.set(run)
        rows = await run.workflow.arun_episode(self._engine, run.episode)
        if rows is None:
            return None
        attempt = run.episode.attempt
        checked, run.facts = check_rows(
            rows, run.episode_id, attempt, temperature=self._temperature
        )
        return checked

    def _give_up(self, run: Run) -> None:
        run.settled = True
        self._is_over(run)

    def _is_over(self, run: Run) -> None:
        self.active.discard(run)
        self._deadlines.discard(run)

    def _expire(self, run: Run) -> None:
        self._settle(run, TimeoutError(f"{run.name} did not end within {run.timeout_s:g} s"))
        if run.task is not None:
            run.task.cancel()

    def _ended(self, run: Run, task: asyncio.Task[EpisodeRows | None]) -> None:
        run.task = None  # it keeps the rows for as long as the run is kept
        self.num_ended += 1
        if task.cancelled():
            error: BaseException | None = RolloutError(f"{run.name} was cancelled from inside")
        else:
            error = task.exception()
        if isinstance(error, FATAL):
            self.set_fatal(error)
        self._settle(run, error, rows=None if error else task.result())

    def _settle(
        self, run: Run, error: BaseException | None, rows: EpisodeRows | None = None
    ) -> None:
        assert run.settle is not None
        assert run.reported is not None
        listeners = self._listeners(run)
        try:
            with self.lock:
                if run.settled:
                    self.num_late += error is None
                    return
                run.settled, run.rows = True, rows
                self._is_over(run)
                state, reason = run.settle(run, error)
                record = run.record(state, reason, self.now()) if listeners else None
            if record is not None:
                self._report(listeners, record)
        except Exception as failure:
            self.set_fatal(failure)
        finally:
            with self.lock:
                run.reported(run)
                self.lock.notify_all()


def _awaits(coroutine: Any) -> list[str]:
    """The calls from a coroutine down to what it waits for."""
    lines = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_qualname}')
        coroutine = coroutine.cr_await
    if coroutine is not None:
        lines.append(f"  awaits {coroutine!r}")
    return lines


async def _cancel(runs: Sequence[Run], timeout_s: float) -> None:
    tasks = [run.task for run in runs if run.task is not None]
    for task in tasks:
        task.cancel()
    if tasks:
        _, pending = await asyncio.wait(tasks, timeout=timeout_s)
        if pending:
            log.warning("%d episodes did not end when they were cancelled", len(pending))
