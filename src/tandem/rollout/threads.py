"""Calling a user's function with a deadline, whether it is async or not. Processes: reward_pool."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

_Job = tuple[Callable[[], Any], Future[Any]]


class DaemonThreads:
    """Daemon threads, which unlike an executor's cannot keep the process from ending.

    A job goes to a thread that is idle or to a new one, never behind a job that may hang.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: deque[SimpleQueue[_Job]] = deque()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            jobs = self._idle.pop()
        except IndexError:
            jobs = SimpleQueue()
            threading.Thread(target=self._serve, args=(jobs,), name=self._name, daemon=True).start()
        jobs.put((function, future))
        return future

    def _serve(self, jobs: SimpleQueue[_Job]) -> None:
        while True:
            self._run(*jobs.get())
            self._idle.append(jobs)

    @staticmethod
    def _run(function: Callable[[], Any], future: Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)


_THREADS = DaemonThreads("tandem-user-code")


async def call_user(
    function: Callable[[], Any], *, is_async: bool, timeout_s: float | None = None
) -> Any:
    """The result of ``function``: async ones run here, others in a thread of their own.

    A thread that hangs cannot be killed; it is left behind at the deadline.

    Raises:
        TimeoutError: it took longer than ``timeout_s``.
    """
    async with asyncio.timeout(timeout_s):
        result = function() if is_async else await asyncio.wrap_future(_THREADS.submit(function))
        return await result if inspect.isawaitable(result) else result
