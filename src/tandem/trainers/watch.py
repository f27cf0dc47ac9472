"""The watchdog of a run: says once a second what is done and waited for, and ends a standstill.

A thread of its own looks at the loop's phase, at rollout and at the generator. What moves, and how
long one may wait for a particular thing, is decided elsewhere.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tandem.errors import StallError, TandemError
from tandem.observe.status import write_status
from tandem.rollout import ComposedInferenceEngine
from tandem.trainers.run import Run

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
LOCK_PATIENCE_S = 5.0
"""How long a look waits for the executor's lock; who holds it longer is part of the stall."""


class Watch:
    """``phase`` and ``beat`` are called by the training loop, everything else by the thread.

    When neither the loop nor an episode nor a token moved for ``run.stall_timeout_s``, every wait
    of the main thread ends with a ``StallError`` that has the stacks of all threads and episodes.
    """

    def __init__(self, run: Run, rollout: ComposedInferenceEngine, *, steps: int) -> None:
        self._run = run
        self._rollout = rollout
        self._steps = steps
        self._limit_s = run.config.run.stall_timeout_s
        self._phase, self._since = "start", time.monotonic()
        self._step = 0
        self._beats = 0
        self._ended = threading.Event()

    def phase(self, name: str, *, step: int | None = None) -> None:
        """The loop turns to something else."""
        self._phase, self._since = name, time.monotonic()
        self._step = self._step if step is None else step
        self.beat()

    def beat(self) -> None:
        """The loop has got on within its phase."""
        self._beats += 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch until the block ends."""
        thread = threading.Thread(target=self._watch, name="tandem-watch", daemon=True)
        thread.start()
        try:
            yield
            self._phase = "finished"
        except BaseException as error:
            self._phase = f"ended by {type(error).__name__}"
            raise
        finally:
            self._ended.set()
            thread.join(INTERVAL_S + LOCK_PATIENCE_S)

    def _watch(self) -> None:
        seen: Any = None
        moved_at = time.monotonic()
        is_told = False
        interval = min(INTERVAL_S, self._limit_s / 4)
        while True:
            is_over = self._ended.wait(interval)
            status, signs = self._look()
            now = time.monotonic()
            if signs != seen:
                seen, moved_at = signs, now
            status["still_for_s"] = now - moved_at
            self._write(status)
            if is_over:
                return
            if now - moved_at > self._limit_s and not is_told:
                is_told = True
                self._end(now - moved_at)

    def _look(self) -> tuple[dict[str, Any], Any]:
        """The status, and what changes as long as anything moves."""
        status: dict[str, Any] = {
            "time": time.time(),
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "incarnation": self._run.incarnation,
            "step": self._step,
            "steps": self._steps,
            "phase": self._phase,
            "phase_for_s": time.monotonic() - self._since,
            "stall_timeout_s": self._limit_s,
        }
        try:
            snapshot = self._rollout.snapshot(LOCK_PATIENCE_S)
            backend = dict(self._rollout.backend.stats())
        except (TimeoutError, TandemError) as error:
            status["trouble"] = f"{type(error).__name__}: {error}"
            return status, (self._beats, "trouble")
        status |= {"rollout": snapshot.to_json(), "backend": backend}
        made = backend.get("tokens"), backend.get("finished")
        return status, (self._beats, snapshot.version, snapshot.num_ended, snapshot.states, made)

    def _write(self, status: dict[str, Any]) -> None:
        try:
            write_status(self._run.dir, status)
        except OSError as error:
            log.warning("status.json cannot be written: %s", error)

    def _end(self, still_s: float) -> None:
        error = StallError(
            f"nothing moved for {still_s:.0f} s (run.stall_timeout_s) in phase {self._phase!r} of "
            f"step {self._step}\n{self._described()}\n{self._stacks()}"
        )
        log.error("%s", error)
        self._run.stop.fail(error)
        self._rollout.executor.loop.set_fatal(error)

    def _described(self) -> str:
        try:
            return self._rollout.snapshot(LOCK_PATIENCE_S).describe()
        except TimeoutError as error:
            return str(error)

    def _stacks(self) -> str:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        parts = []
        for ident, frame in sys._current_frames().items():
            if ident != threading.get_ident():
                stack = "".join(traceback.format_stack(frame))
                parts.append(f"thread {names.get(ident, ident)}:\n{stack}")
        for name, lines in self._rollout.executor.loop.stacks():
            parts.append("\n".join([f"{name}:", *lines, ""]))
        return "\n".join(parts).rstrip()
