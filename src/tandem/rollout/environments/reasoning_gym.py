"""Several attempts at one procedural problem, with the task's own score as feedback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.errors import ConfigError, DataError
from tandem.rollout.environments.contract import Environment, Step
from tandem.rollout.rewards import reasoning_gym

FEEDBACK = "That is not right. Try again."


class AttemptsEnvironment(Environment):
    """Rows of ``data.source: reasoning_gym``: each turn is an answer, scored by its task.

    An answer that scores ``solved`` or more ends the conversation, and so does the last of
    ``max_attempts``. The reward is the score at the end, times ``discount`` for every attempt that
    came before; wrong attempts earn nothing. ``feedback`` is what a wrong answer is told;
    ``{attempts}`` in it is the number of those left.
    """

    def __init__(
        self,
        *,
        max_attempts: int = 2,
        feedback: str = FEEDBACK,
        discount: float = 1.0,
        solved: float = 1.0,
    ) -> None:
        if max_attempts < 1:
            raise ConfigError(f"max_attempts: got {max_attempts}, allowed: an integer >= 1")
        if not 0 <= discount <= 1:
            raise ConfigError(f"discount: got {discount}, allowed: a number in [0, 1]")
        self._max_attempts = max_attempts
        self._feedback = feedback
        self._discount = discount
        self._solved = solved
        self._data: Mapping[str, Any] = {}
        self._made = 0

    def reset(self, seed: int, data: Mapping[str, Any]) -> None:
        missing = [name for name in ("task", "entry") if name not in data]
        if missing:
            raise DataError(
                f"environment reasoning_gym: missing column {missing[0]!r}; present: "
                f"{', '.join(sorted(data))}; use data.source=reasoning_gym"
            )
        self._data, self._made = data, 0

    def step(self, action: str) -> Step:
        self._made += 1
        columns = {name: self._data[name] for name in ("task", "entry")}
        score = reasoning_gym(None, action, (), (), **columns)
        left = self._max_attempts - self._made
        if score >= self._solved or left == 0:
            return "", score * self._discount ** (self._made - 1), True
        return self._feedback.replace("{attempts}", str(left)), 0.0, False
