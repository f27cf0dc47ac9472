"""Wrong answers: functions ``(row, rng, **kwargs) -> answer``.

They make imperfect demonstrations, and the rejected answers of preference pairs. A user's own is
named in ``data.answer_noise`` by Python path; the built-in ones are in ``NOISES``.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from tandem.config.objects import load_function
from tandem.data.sources import Row
from tandem.data.text import fill
from tandem.errors import ConfigError

AnswerNoise = Callable[..., str]


def wrong_variant(row: Row, rng: Random, *, probability: float, template: str = "{word}") -> str:
    """With ``probability`` the filled ``template`` instead of the answer: the same mistake always.

    With the task ``spell_backward`` the default spells the word forwards.
    """
    if rng.random() < probability:
        return fill(template, row, "answer_noise wrong_variant")
    return str(row["answer"])


def near_miss(row: Row, rng: Random, *, largest: int = 9) -> str:
    """A slip: a whole number off by 1 to ``largest``, or a text with two characters exchanged.

    A text all of whose characters are equal loses its last one.
    """
    answer = str(row["answer"]).strip()
    if answer.removeprefix("-").isdecimal():
        return str(int(answer) + rng.choice((-1, 1)) * rng.randint(1, largest))
    places = [i for i in range(len(answer) - 1) if answer[i] != answer[i + 1]]
    if not places:
        return answer[:-1]
    i = rng.choice(places)
    return answer[:i] + answer[i + 1] + answer[i] + answer[i + 2 :]


NOISES: dict[str, AnswerNoise] = {
    "near_miss": near_miss,
    "wrong_variant": wrong_variant,
}


def load_noise(spec: str, kwargs: dict[str, Any]) -> Callable[[Row, Random], str]:
    """The noise named by ``data.answer_noise``, with its ``data.answer_noise_kwargs`` bound."""
    noise = load_function(spec, NOISES, field="data.answer_noise")

    def bound(row: Row, rng: Random) -> str:
        try:
            return str(noise(row, rng, **kwargs))
        except TypeError as error:
            raise ConfigError(
                f"data.answer_noise {spec!r} with answer_noise_kwargs={kwargs!r}: {error}"
            ) from error

    return bound
