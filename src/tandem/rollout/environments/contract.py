"""The contract of an environment, and finding one by name."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar

from tandem.config.objects import load_object
from tandem.errors import ConfigError
from tandem.rollout.transcript import Observation
from tandem.types import StopReason

Step = tuple[Observation, float | None, bool]
"""``(observation, reward, done)``. With ``done`` the observation is shown to nobody."""


class Environment(ABC):
    """One conversation's other side; made anew for every trajectory.

    ``reset`` and ``step`` may be ``async def``. Plain ones run in a thread, so that they may block;
    with ``is_instant`` they run in the rollout thread itself. What they raise loses the sample.
    ``keeps_special_tokens`` says that an action's text is to contain them. ``stop_reason`` is how
    the last turn ended where the environment knows better than the engine.
    """

    is_instant: ClassVar[bool] = False
    keeps_special_tokens: ClassVar[bool] = False
    stop_reason: StopReason | None = None

    @abstractmethod
    def reset(
        self, seed: int, data: Mapping[str, Any]
    ) -> Observation | Awaitable[Observation | None] | None:
        """Begin. The observation takes the place of the row's prompt; None keeps it.

        ``seed`` is the same for all samples of a group, so that they face the same task; ``data``
        holds the columns of the row.
        """

    @abstractmethod
    def step(self, action: str) -> Step | Awaitable[Step]:
        """Answer what the model said. The reward is that of this turn; None counts as 0."""

    def close(self) -> None:
        """Release what this conversation holds; called once, however it ended."""


EnvironmentFactory = Callable[[], Environment]

_BUILT_IN = {
    "reasoning_gym": "tandem.rollout.environments.reasoning_gym:AttemptsEnvironment",
    "textarena": "tandem.rollout.environments.textarena:TextArenaEnvironment",
}


def load_environment(
    name: str | Callable[..., Environment], kwargs: Mapping[str, Any] | None = None
) -> EnvironmentFactory:
    """What makes environments: a built-in's name, ``path/file.py:Class``, or a callable.

    Raises:
        ConfigError: there is none, or it cannot be made with ``kwargs``.
    """
    field = "rollout.workflow_kwargs.environment"
    if isinstance(name, str):
        if name not in _BUILT_IN and ":" not in name:
            raise ConfigError(
                f"{field}: got {name!r}, allowed: {', '.join(sorted(_BUILT_IN))}, "
                "path/file.py:Class or package.module:Class"
            )
        make = load_object(_BUILT_IN.get(name, name), field=field)
    else:
        make = name
    factory = functools.partial(make, **(kwargs or {}))
    try:
        made = factory()
    except TypeError as error:
        raise ConfigError(f"{field}_kwargs: {name}: {error}") from error
    if not isinstance(made, Environment):
        raise ConfigError(f"{field}: {name} made a {type(made).__name__}, allowed: an Environment")
    made.close()
    return factory
