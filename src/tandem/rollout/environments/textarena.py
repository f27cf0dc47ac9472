"""Text games of the ``textarena`` package, played alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tandem.errors import CapabilityError, ConfigError
from tandem.rollout.environments.contract import Environment, Step

_GLOBAL_RANDOM = threading.Lock()
"""The games draw from Python's global generator, one at a time and each from its own state."""


class TextArenaEnvironment(Environment):
    """One game of ``game`` (such as ``GuessTheNumber-v0``) for one player.

    The reward is the game's own, at its end. ``game_kwargs`` go to ``textarena.make``.

    Raises:
        CapabilityError: the package is not installed.
        ConfigError: there is no such game.
    """

    def __init__(self, *, game: str, game_kwargs: Mapping[str, Any] | None = None) -> None:
        try:
            import textarena
        except ImportError as error:
            raise CapabilityError(
                "environment textarena: the package textarena is not installed; install it with: "
                "pip install 'tandem-rl[textarena]'"
            ) from error
        try:
            self._game = textarena.make(game, **(game_kwargs or {}))
        except (KeyError, ValueError, TypeError) as error:
            raise ConfigError(f"environment textarena: game {game!r}: {error}") from error
        self._random_state: Any = None

    def reset(self, seed: int, data: Mapping[str, Any]) -> str:
        with self._own_random():
            self._game.reset(num_players=1, seed=seed)
            return self._observation()

    def step(self, action: str) -> Step:
        with self._own_random():
            done, _ = self._game.step(action=action)
            if not done:
                return self._observation(), 0.0, False
            rewards, _ = self._game.close()
        return "", float((rewards or {}).get(0, 0.0)), True

    def _observation(self) -> str:
        _, observation = self._game.get_observation()
        if isinstance(observation, str):
            return observation
        return "\n".join(str(message[1]) for message in observation)

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        with _GLOBAL_RANDOM:
            outside = random.getstate()
            if self._random_state is not None:
                random.setstate(self._random_state)
            try:
                yield
            finally:
                self._random_state = random.getstate()
                random.setstate(outside)
