"""Running a reward: where, for how long, and what counts as a score. The functions: ``rewards``."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from numbers import Real
from queue import SimpleQueue
from typing import Any, Protocol

from tandem.config.schema import RewardConfig
from tandem.errors import ConfigError, RolloutError
from tandem.rollout.reward_pool import RewardPool
from tandem.rollout.rewards import INSTANT, RewardFunction, call, load_function


class RewardError(RolloutError):
    """One completion could not be scored: this sample failed. Never a reward of 0."""


_Job = tuple[Callable[[], Any], Future[Any]]


class _Pool(Protocol):
    def submit(self, arguments: Sequence[Any], data: Mapping[str, Any]) -> Future[Any]: ...


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function and its deadline of ``timeout_s`` per completion.

    Built-in functions run in the rollout thread, async ones as tasks, other functions in threads
    of their own. A thread that hangs cannot be killed: its sample fails at the deadline
    and the thread stays behind. ``pool`` runs the function in child processes, which are killed.
    """

    function: RewardFunction | None
    timeout_s: float = 30.0
    pool: _Pool | None = None

    async def score(
        self,
        *,
        prompt: Any,
        completion: str,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        data: Mapping[str, Any],
    ) -> float | None:
        """A finite number, or None: cannot be scored.

        Raises:
            RewardError: it raised, ran out of time or returned something else.
            ConfigError: it cannot work with these data at all.
        """
        arguments = (prompt, completion, list(prompt_ids), list(completion_ids))
        try:
            return checked_score(await self._run(arguments, data))
        except (ConfigError, RewardError):
            raise
        except TimeoutError as error:
            raise RewardError(
                f"the reward did not end within {self.timeout_s:g} s (reward.timeout_s); "
                "reward.process=true kills what hangs"
            ) from error
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            # sys.exit() in a reward is no reason to end the run, least of all with that code.
            raise RewardError(f"the reward raised {type(error).__name__}: {error}") from error

    async def _run(self, arguments: Sequence[Any], data: Mapping[str, Any]) -> Any:
        if self.pool is not None:
            return await asyncio.wrap_future(self.pool.submit(arguments, dict(data)))
        function = self.function
        assert function is not None
        if getattr(function, "func", function) in INSTANT:
            return call(function, arguments, data)
        async with asyncio.timeout(self.timeout_s):
            if inspect.iscoroutinefunction(getattr(function, "func", function)):
                return await call(function, arguments, data)
            result = await asyncio.wrap_future(
                _THREADS.submit(lambda: call(function, arguments, data))
            )
            return await result if inspect.isawaitable(result) else result


def checked_score(value: Any) -> float | None:
    """``value`` as a float; booleans count as 0 and 1.

    Raises:
        RewardError: it is neither None nor a finite number.
    """
    if value is None:
        return None
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if not isinstance(value, Real):
        raise RewardError(
            f"the reward returned a {type(value).__name__}, allowed: a finite number or None"
        )
    if not math.isfinite(value):
        raise RewardError(f"the reward returned {value}, allowed: a finite number or None")
    return float(value)


class _Threads:
    """Daemon threads, which unlike an executor's cannot keep the process from ending.

    A job goes to a thread that is idle or to a new one, never behind a job that may hang.
    """

    def __init__(self) -> None:
        self._idle: deque[SimpleQueue[_Job]] = deque()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            jobs = self._idle.pop()
        except IndexError:
            jobs = SimpleQueue()
            threading.Thread(
                target=self._serve, args=(jobs,), name="tandem-reward", daemon=True
            ).start()
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


_THREADS = _Threads()


def load_reward(config: RewardConfig) -> Reward:
    """The reward that a configuration names; with ``process``, in a pool of child processes."""
    if config.process:
        pool = RewardPool(
            config.name, config.kwargs, workers=config.workers, timeout_s=config.timeout_s
        )
        return Reward(None, config.timeout_s, pool)
    return Reward(load_function(config.name, config.kwargs), config.timeout_s)
