"""The answer that a completion gives, as text that can be compared: what maj@k counts votes by.

Torch-free. Whether an answer is right is a reward's matter (``rewards``).
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tandem.config.objects import load_function
from tandem.errors import DataError
from tandem.rollout.rewards import last_number

AnswerKey = Callable[[str], str | None]

_SPACES = re.compile(r"\s+")


def text_answer(completion: str) -> str | None:
    """The whole completion in lower case, white space made single, without a last full stop."""
    words = _SPACES.sub(" ", completion).strip().removesuffix(".").rstrip().casefold()
    return words or None


def number_answer(completion: str) -> str | None:
    """The last number (after ``####`` if that stands there), in lowest terms; None without one."""
    found = last_number(completion.rsplit("####", 1)[-1])
    return None if found is None else str(found)


ANSWER_KEYS: dict[str, AnswerKey] = {"text": text_answer, "number": number_answer}

_OF_REWARD = {"gsm8k": "number", "numeric_match": "number"}
"""Rewards that read a completion otherwise than as text."""


def load_answer_key(name: str, reward: str) -> AnswerKey:
    """The function called ``name``; ``auto`` is what the reward called ``reward`` looks at.

    Raises:
        ConfigError: no such function.
    """
    if name == "auto":
        name = _OF_REWARD.get(reward, "text")
    if name in ANSWER_KEYS:
        return ANSWER_KEYS[name]
    function = load_function(name, ANSWER_KEYS, field="eval.answer", also=("auto",))

    def checked(completion: str) -> str | None:
        answer = function(completion)
        if answer is not None and not isinstance(answer, str):
            raise DataError(
                f"eval.answer: {name} returned a {type(answer).__name__}, allowed: text or None"
            )
        return answer

    return checked
