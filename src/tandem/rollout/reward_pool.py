"""Rewards in child processes with a deadline: what hangs is killed and replaced.

One thread here per child hands it completions and waits for scores, so the pool works from any
thread and any event loop. Plain subprocesses with JSON messages: nothing is pickled.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from tandem.errors import ConfigError, EngineError, RolloutError
from tandem.rollout.frames import encode_frame, read_frame, write_frame
from tandem.rollout.limits import Limits

START_TIMEOUT_S = 60.0
MAX_HANGS_IN_ROW = 16


@dataclass(slots=True, eq=False)
class _Job:
    frame: bytes
    prompt: str
    future: Future[Any] = field(default_factory=Future)


class RewardPool:
    """``workers`` processes that call one reward function; started at the first completion.

    A call that takes longer than ``timeout_s`` ends with ``TimeoutError``; its process is killed,
    a new one takes its place and the pool keeps its size. ``limits`` hold for each process.

    After ``MAX_HANGS_IN_ROW`` such calls in a row, about more than one prompt, whatever waits ends
    with ``TimeoutError`` too, untried: a function that always hangs is known after that many
    deadlines, not after one for each completion. What comes later is tried again.
    """

    def __init__(
        self,
        name: str,
        kwargs: Mapping[str, Any] | None = None,
        *,
        workers: int = 1,
        timeout_s: float = 30.0,
        limits: Limits | None = None,
    ) -> None:
        if workers < 1:
            raise ConfigError(f"reward.workers: got {workers}, allowed: an integer >= 1")
        spec = {
            "name": name,
            "kwargs": dict(kwargs or {}),
            "limits": asdict(limits or Limits()),
        }
        self._spec = encode_frame(spec)
        self._num_workers = workers
        self._timeout_s = timeout_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._hangs = _Hangs(self._jobs)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._closer: weakref.finalize[..., Any] | None = None

    def submit(self, arguments: Sequence[Any], data: Mapping[str, Any]) -> Future[Any]:
        """Score ``(prompt, completion, prompt_ids, completion_ids)`` with the row's columns.

        The future has what the function returned, or ``TimeoutError``, ``RolloutError`` (it
        raised, or its process died) or ``ConfigError`` (it cannot be loaded).

        Raises:
            DataError: a column is no JSON.
        """
        job = _Job(
            encode_frame({"arguments": list(arguments), "data": dict(data)}), repr(arguments[0])
        )
        with self._lock:
            self._start()
            self._jobs.put(job)
        return job.future

    def _start(self) -> None:
        if self._threads:
            return
        for index in range(self._num_workers):
            thread = threading.Thread(
                target=_serve,
                args=(self._jobs, self._spec, self._timeout_s, self._hangs),
                name=f"tandem-reward-{index}",
                daemon=True,
            )
            thread.start()
            self._threads.append(thread)
        self._closer = weakref.finalize(self, _stop, self._jobs, self._num_workers)

    def close(self) -> None:
        """End all processes after the completions already submitted. Idempotent."""
        with self._lock:
            threads, self._threads = self._threads, []
            if self._closer is not None:
                self._closer()
        for thread in threads:
            thread.join()


def _stop(jobs: queue.SimpleQueue[_Job | None], count: int) -> None:
    for _ in range(count):
        jobs.put(None)


class _Hangs:
    """Deadlines that passed since the last answer, of all workers of a pool."""

    def __init__(self, jobs: queue.SimpleQueue[_Job | None]) -> None:
        self._jobs = jobs
        self._lock = threading.Lock()
        self._count = 0
        self._prompts: set[str] = set()

    def answered(self) -> None:
        with self._lock:
            self._count = 0
            self._prompts.clear()

    def hung(self, job: _Job) -> None:
        """One more; beyond the limit, end whatever waits."""
        with self._lock:
            self._count += 1
            self._prompts.add(job.prompt)
            if self._count < MAX_HANGS_IN_ROW or len(self._prompts) < 2:
                return
            waiting = []
            with suppress(queue.Empty):
                while True:
                    waiting.append(self._jobs.get_nowait())
        for other in waiting:
            if other is None:
                self._jobs.put(None)
            elif other.future.set_running_or_notify_cancel():
                other.future.set_exception(TimeoutError(f"untried after {self._count} hung calls"))


def _serve(
    jobs: queue.SimpleQueue[_Job | None], spec: bytes, timeout_s: float, hangs: _Hangs
) -> None:
    """Owns one child. Knows nothing of the pool, so a forgotten pool can be collected."""
    child = _Child(spec)
    while (job := jobs.get()) is not None:
        if not job.future.set_running_or_notify_cancel():
            continue
        try:
            result = child.call(job.frame, timeout_s)
        except Exception as error:
            child.kill()
            child = _Child(spec)
            if isinstance(error, TimeoutError):
                hangs.hung(job)
            job.future.set_exception(error)
        else:
            hangs.answered()
            if "error" in result:
                job.future.set_exception(RolloutError(str(result["error"])))
            else:
                job.future.set_result(result.get("value"))
    child.kill()


class _Child:
    """One worker process. It starts at once and is greeted when it is first needed."""

    def __init__(self, spec: bytes) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tandem.rollout.reward_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._is_ready = False
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests = self._process.stdin.fileno()
        self._answers = self._process.stdout.fileno()
        with suppress(EngineError):  # a child that is gone is noticed by the first call
            write_frame(self._requests, spec)

    def call(self, frame: bytes, timeout_s: float) -> dict[str, Any]:
        if not self._is_ready:
            self._greet()
        write_frame(self._requests, frame)
        return self._answer(time.monotonic() + timeout_s)

    def _greet(self) -> None:
        greeting = self._answer(time.monotonic() + START_TIMEOUT_S)
        if "error" in greeting:
            raise ConfigError(f"reward: the worker cannot start: {greeting['error']}")
        self._is_ready = True

    def _answer(self, deadline: float) -> dict[str, Any]:
        answer = read_frame(self._answers, deadline)
        if answer is None:
            code = self._process.wait()
            if code == -signal.SIGXCPU:
                raise RolloutError("the reward used more processor time than reward.cpu_s allows")
            raise RolloutError(f"the reward process died with code {code}")
        result: dict[str, Any] = answer
        return result

    def kill(self) -> None:
        """Kill the process and whatever it started."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()
