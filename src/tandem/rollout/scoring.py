"""Running a reward: where, for how long, how many at once, and what counts as a score.

The functions themselves are in ``rewards``, child processes in ``reward_pool``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, Protocol
from weakref import WeakKeyDictionary

from tandem.config.reward import RewardConfig
from tandem.errors import ConfigError
from tandem.rollout.limits import Limits
from tandem.rollout.reward_pool import RewardPool
from tandem.rollout.rewards import PARTS, Prepared, RewardFunction, reward_function
from tandem.rollout.threads import call_user
from tandem.rollout.workflow import SampleError

Per = Literal["completion", "group", "batch"]


class RewardError(SampleError):
    """One completion could not be scored: this sample failed. Never a reward of 0."""


class Score(float):
    """A reward that is the weighted sum of ``parts``."""

    parts: tuple[float, ...]

    @classmethod
    def of(cls, parts: Sequence[float], weights: Sequence[float]) -> Score:
        made = cls(sum(w * part for w, part in zip(weights, parts, strict=True)))
        made.parts = tuple(parts)
        return made


class _Pool(Protocol):
    def submit(self, arguments: Sequence[Any], data: Mapping[str, Any]) -> Future[Any]: ...


@dataclass(frozen=True, slots=True)
class Completion:
    """What a reward function is asked about. ``columns`` come beside those of the row."""

    prompt: Any
    completion: str
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Reward:
    """A reward function, its deadline of ``timeout_s`` per call, and how it is called.

    ``per`` says what one call sees: a ``completion``; the whole ``group`` of a prompt (the second
    and fourth argument are lists, and so is what it returns); or a ``batch`` of up to
    ``batch_size`` completions of any prompts, collected for at most ``batch_wait_s`` (all four
    arguments and every column are lists). At most ``max_concurrent`` calls run at once.

    Built-in functions run in the rollout thread, async ones as tasks, other functions in threads
    of their own. A thread that hangs cannot be killed: its sample fails at the deadline
    and the thread stays behind. ``pool`` runs the function in child processes, which are killed.

    With ``weights`` every score is a mapping with their labels, and its weighted sum is the reward,
    a ``Score``.
    """

    function: RewardFunction | None
    timeout_s: float = 30.0
    pool: _Pool | None = None
    per: Per = "completion"
    batch_size: int = 64
    batch_wait_s: float = 0.05
    max_concurrent: int | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    _loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopState] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        self._prepared = None if self.function is None else Prepared(self.function)

    @property
    def sees_group(self) -> bool:
        return self.per == "group"

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
        if self.per == "completion":
            arguments = (prompt, completion, list(prompt_ids), list(completion_ids))
            return self._checked(await self._call(arguments, data))
        asked = Completion(prompt, completion, prompt_ids, completion_ids)
        scores = (
            await self._batcher().score(asked, data)
            if self.per == "batch"
            else (await self.score_group([asked], data))[0]
        )
        if isinstance(scores, RewardError):
            raise scores
        return scores

    async def score_group(
        self, asked: Sequence[Completion], data: Mapping[str, Any]
    ) -> list[float | RewardError | None]:
        """One call about all completions of one prompt; a failure is told for each of them."""
        first = asked[0]
        columns: dict[str, Any] = dict(data)
        for name in {name for item in asked for name in item.columns}:
            columns[name] = [item.columns.get(name) for item in asked]
        arguments = (
            first.prompt,
            [item.completion for item in asked],
            list(first.prompt_ids),
            [list(item.completion_ids) for item in asked],
        )
        return await self._call_many(arguments, columns, len(asked))

    async def _score_batch(
        self, asked: Sequence[Completion], rows: Sequence[Mapping[str, Any]]
    ) -> list[float | RewardError | None]:
        names = {name for row in rows for name in row}
        columns = {name: [row.get(name) for row in rows] for name in names}
        arguments = (
            [item.prompt for item in asked],
            [item.completion for item in asked],
            [list(item.prompt_ids) for item in asked],
            [list(item.completion_ids) for item in asked],
        )
        return await self._call_many(arguments, columns, len(asked))

    async def _call_many(
        self, arguments: Sequence[Any], columns: Mapping[str, Any], count: int
    ) -> list[float | RewardError | None]:
        try:
            return checked_scores(await self._call(arguments, columns), count, self._checked)
        except RewardError as error:
            return [error] * count

    async def _call(self, arguments: Sequence[Any], data: Mapping[str, Any]) -> Any:
        try:
            if self.max_concurrent is None:
                return await self._run(arguments, data)
            async with self._of_loop().semaphore:
                return await self._run(arguments, data)
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
        prepared = self._prepared
        assert prepared is not None
        if prepared.is_instant:
            return prepared(arguments, data)
        return await call_user(
            lambda: prepared(arguments, data),
            is_async=prepared.is_async,
            timeout_s=self.timeout_s,
        )

    def _checked(self, value: Any) -> float | None:
        """``checked_score`` of a number, or of every part of a mapping; without one of them None.

        Raises:
            ConfigError: the labels are not those of ``weights``.
        """
        is_mapping = isinstance(value, Mapping)
        if value is None or (not is_mapping and not self.weights):
            return checked_score(value)
        labels = sorted(map(str, value)) if is_mapping else []
        if labels != sorted(self.weights):
            received = ", ".join(labels) or "one number"
            raise ConfigError(
                f"reward.weights: got {', '.join(self.weights) or 'none'}, but the reward returned "
                f"{received}; name all of its parts with their weights, and no others"
            )
        scores = [checked_score(value[label]) for label in self.weights]
        known = [score for score in scores if score is not None]
        if len(known) < len(scores):
            return None
        return Score.of(known, list(self.weights.values()))

    # asyncio's locks belong to one event loop; a reward may be used from several.

    def _batcher(self) -> _Batcher:
        return self._of_loop().batcher

    def _of_loop(self) -> _LoopState:
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            self._loops[loop] = _LoopState(
                asyncio.Semaphore(self.max_concurrent or 1),
                _Batcher(self._score_batch, self.batch_size, self.batch_wait_s),
            )
        return self._loops[loop]


@dataclass(slots=True)
class _LoopState:
    semaphore: asyncio.Semaphore
    batcher: _Batcher


_Waiting = tuple[Completion, Mapping[str, Any], "asyncio.Future[float | RewardError | None]"]
_Scorer = Callable[[Sequence[Completion], Sequence[Mapping[str, Any]]], Any]


class _Batcher:
    """Collects completions until there are ``size``, or the oldest has waited ``wait_s``."""

    def __init__(self, score: _Scorer, size: int, wait_s: float) -> None:
        self._score = score
        self._size = size
        self._wait_s = wait_s
        self._waiting: list[_Waiting] = []
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def score(
        self, completion: Completion, data: Mapping[str, Any]
    ) -> float | RewardError | None:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[float | RewardError | None] = loop.create_future()
        self._waiting.append((completion, data, answer))
        if len(self._waiting) >= self._size:
            self._send()
        elif self._timer is None:
            self._timer = loop.call_later(self._wait_s, self._send)
        return await answer

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch = [item for item in self._waiting if not item[2].done()]
        self._waiting = []
        if batch:
            task = asyncio.get_running_loop().create_task(self._run(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, batch: Sequence[_Waiting]) -> None:
        try:
            scores = await self._score([item[0] for item in batch], [item[1] for item in batch])
        except BaseException as error:
            for _, _, answer in batch:
                if not answer.done():
                    answer.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        for (_, _, answer), score in zip(batch, scores, strict=True):
            if not answer.done():
                answer.set_result(score)


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


def checked_scores(
    value: Any, count: int, check: Callable[[Any], float | None] = checked_score
) -> list[float | RewardError | None]:
    """``value`` as ``count`` scores; one that is no score is that sample's failure alone.

    Raises:
        RewardError: it is no list of that length.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list | tuple) or len(value) != count:
        is_list = isinstance(value, list | tuple)
        received = f"{len(value)} scores" if is_list else type(value).__name__
        raise RewardError(f"the reward returned {received}, allowed: a list of {count} scores")
    scores: list[float | RewardError | None] = []
    for item in value:
        try:
            scores.append(check(item))
        except RewardError as error:
            scores.append(error)
    return scores


def load_reward(config: RewardConfig) -> Reward:
    """The reward that a configuration names; with ``process``, in a pool of child processes."""
    how: dict[str, Any] = {
        "per": config.per,
        "batch_size": config.batch_size,
        "batch_wait_s": config.batch_wait_s,
        "max_concurrent": config.max_concurrent,
        "weights": config.part_weights,
    }
    name, kwargs = config.name, config.kwargs
    if config.parts:
        name = PARTS
        kwargs = {PARTS: {label: part.model_dump() for label, part in config.parts.items()}}
    if config.process:
        pool = RewardPool(
            name,
            kwargs,
            workers=config.workers,
            timeout_s=config.timeout_s,
            limits=Limits(config.memory_mb, config.cpu_s, config.network),
        )
        return Reward(None, config.timeout_s, pool, **how)
    return Reward(reward_function(name, kwargs), config.timeout_s, **how)
