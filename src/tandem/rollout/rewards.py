"""Reward functions by name. Torch-free: a reward worker imports this file and little else.

``reward(prompt, completion, prompt_ids, completion_ids, **data)`` returns a number, or None: this
completion cannot be scored. Running them (deadlines, threads, processes) is in ``scoring``.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from tandem.config.objects import load_function
from tandem.errors import ConfigError
from tandem.rollout.code_reward import code

RewardFunction = Callable[..., Any]

CONTRACT = ("prompt", "completion", "prompt_ids", "completion_ids")

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"
_NUMBER = re.compile(rf"(?:(?<!\d)[-+])?(?:{_DIGITS}(?:\s*/\s*\d+(?:\.\d+)?)?|\.\d+)")
MAX_DIGITS = 400
"""Longer numbers are no answers; parsing them could take for ever."""


def exact_match(
    prompt: Any,
    completion: str,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    *,
    answer: Any,
    **data: Any,
) -> float:
    """1 when the completion is the answer, white space around both left out."""
    return float(completion.strip() == str(answer).strip())


def numeric_match(
    prompt: Any,
    completion: str,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    *,
    answer: Any,
    tolerance: float = 1e-6,
    **data: Any,
) -> float:
    """1 when the last number of the completion equals the last number of the answer.

    Numbers may have thousands separators, decimals, or be fractions; ``tolerance`` is relative.
    """
    expected = last_number(str(answer))
    if expected is None:
        raise ConfigError(
            f"reward numeric_match: the answer {answer!r} has no number; use exact_match or "
            "another column"
        )
    return float(_equal(last_number(completion), expected, tolerance))


def contains_answer(
    prompt: Any,
    completion: str,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    *,
    answer: Any,
    **data: Any,
) -> float:
    """1 when the answer stands in the completion as whole words, in any case."""
    words = rf"(?<!\w){re.escape(str(answer).strip())}(?!\w)"
    return float(re.search(words, completion, re.IGNORECASE) is not None)


def concise_answer(
    prompt: Any,
    completion: str,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    *,
    answer: Any,
    **data: Any,
) -> float:
    """1 for the answer alone (a full stop may follow), 0.5 when there is more around it."""
    if completion.strip().removesuffix(".").lower() == str(answer).strip().lower():
        return 1.0
    return contains_answer(prompt, completion, prompt_ids, completion_ids, answer=answer) / 2


def gsm8k(
    prompt: Any,
    completion: str,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    *,
    answer: Any,
    **data: Any,
) -> float:
    """1 when the number after ``####`` (or, without it, the last number) is the answer's."""
    expected = last_number(str(answer).rsplit("####", 1)[-1])
    if expected is None:
        raise ConfigError(f"reward gsm8k: the answer {answer!r} has no number after ####")
    return float(_equal(last_number(completion.rsplit("####", 1)[-1]), expected, 0.0))


def math(
    prompt: Any,
    completion: str,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    *,
    answer: Any,
    **data: Any,
) -> float:
    """1 when the completion's LaTeX (in ``\\boxed``, or the last in dollars) equals the answer's.

    Equality is symbolic (``math-verify``, extra ``math``). Without LaTeX in the completion its last
    number counts. Algebra can take for ever, so this one needs ``reward.process=true``.
    """
    found = _latex(completion)
    if not found:
        expected = last_number(str(answer))
        return float(expected is not None and _equal(last_number(completion), expected, 1e-6))
    text = str(answer)
    expected_latex = _latex(text if "$" in text or "\\boxed" in text else f"${text}$")
    if not expected_latex:
        raise ConfigError(
            f"reward math: the answer {answer!r} is no LaTeX expression and no number"
        )
    from math_verify import verify

    # The deadline is the worker's; math-verify's own works in a main thread only.
    return float(verify(expected_latex, found, timeout_seconds=None))


def _latex(text: str) -> list[Any]:
    """What math-verify's LaTeX grammar reads; its other parsers evaluate Python and stay unused."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    try:
        from math_verify import LatexExtractionConfig, parse
    except ImportError as error:
        raise ConfigError(
            "reward math: needs math-verify; pip install 'tandem-rl[math]'"
        ) from error
    found: list[Any] = parse(
        text, extraction_config=[LatexExtractionConfig()], parsing_timeout=None
    )
    return found


def matches_format(
    prompt: Any,
    completion: str,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    *,
    pattern: str = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*",
    **data: Any,
) -> float:
    """1 when the whole completion matches the regular expression; a dot matches line ends too."""
    try:
        return float(re.fullmatch(pattern, completion, re.DOTALL) is not None)
    except re.error as error:
        raise ConfigError(f"reward.kwargs.pattern: got {pattern!r}: {error}") from error


def reasoning_gym(
    prompt: Any,
    completion: str,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    *,
    task: str,
    entry: Mapping[str, Any],
    **data: Any,
) -> float:
    """The score, in [0, 1], that the task's own scorer gives; white space around is left out."""
    return float(_scorer(task)(completion.strip(), dict(entry)))


@functools.cache
def _scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    from reasoning_gym import get_score_answer_fn

    scorer: Callable[[str, dict[str, Any]], float] = get_score_answer_fn(task)
    return scorer


def auto(
    prompt: Any,
    completion: str,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    **data: Any,
) -> float:
    """The scorer of the row's own source: only procedural tasks bring one."""
    if "task" in data and "entry" in data:
        return reasoning_gym(prompt, completion, prompt_ids, completion_ids, **data)
    raise ConfigError(
        f"rollout.reward.name=auto: these data bring no scorer of their own (columns: "
        f"{', '.join(sorted(data))}); name one of {', '.join(sorted(BUILT_IN))}, "
        "path/file.py:function or package.module:function"
    )


def model(
    prompt: Any,
    completion: str,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    **data: Any,
) -> float:
    """0: the score comes from the run's ``reward_model``, after the rollout."""
    return 0.0


def compose(parts: Mapping[str, Mapping[str, Any]]) -> RewardFunction:
    """One function for several: it returns what each of ``parts`` does, by label.

    Each part is ``name`` and ``kwargs``. The function is async when one of them is; those that are
    not run in threads then.
    """
    functions = {
        label: Prepared(reward_function(part["name"], part.get("kwargs", {})))
        for label, part in parts.items()
    }

    def together(
        prompt: Any,
        completion: str,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        **data: Any,
    ) -> dict[str, Any]:
        arguments = (prompt, completion, prompt_ids, completion_ids)
        return {label: function(arguments, data) for label, function in functions.items()}

    async def together_async(
        prompt: Any,
        completion: str,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        **data: Any,
    ) -> dict[str, Any]:
        arguments = (prompt, completion, prompt_ids, completion_ids)

        async def one(function: Prepared) -> Any:
            if function.is_async:
                return await function(arguments, data)
            return await asyncio.to_thread(function, arguments, data)

        values = await asyncio.gather(*map(one, functions.values()))
        return dict(zip(functions, values, strict=True))

    return together_async if any(each.is_async for each in functions.values()) else together


PARTS = "parts"
"""The name under which ``compose`` is loaded; its keyword is ``parts``."""

BUILT_IN: dict[str, RewardFunction] = {
    "auto": auto,
    "code": code,
    "concise_answer": concise_answer,
    "contains_answer": contains_answer,
    "exact_match": exact_match,
    "format": matches_format,
    "gsm8k": gsm8k,
    "math": math,
    "model": model,
    "numeric_match": numeric_match,
    "reasoning_gym": reasoning_gym,
}

INSTANT = frozenset({concise_answer, contains_answer, exact_match, gsm8k, model, numeric_match})
"""Fast enough, for any completion, to be called in the rollout thread itself."""


def last_number(text: str) -> Fraction | None:
    """The last number in ``text``; None without one, or when it is absurdly long."""
    matches = _NUMBER.findall(text[-100_000:])
    if not matches or len(matches[-1]) > MAX_DIGITS:
        return None
    numerator, _, denominator = matches[-1].replace(",", "").partition("/")
    value = Fraction(numerator.strip())
    if not denominator:
        return value
    divisor = Fraction(denominator.strip())
    return None if divisor == 0 else value / divisor


def _equal(received: Fraction | None, expected: Fraction, tolerance: float) -> bool:
    if received is None:
        return False
    return abs(received - expected) <= Fraction(tolerance) * abs(expected)


def reward_function(name: str, kwargs: Mapping[str, Any]) -> RewardFunction:
    """The function called ``name`` with ``kwargs`` fixed; see ``RewardConfig``."""
    if name == PARTS:
        return compose(**kwargs)
    function = load_function(name, BUILT_IN, field="reward.name", also=(PARTS,))
    return functools.partial(function, **kwargs) if kwargs else function


class Prepared:
    """A reward function with what its signature asks for looked up once, at the first call.

    One without ``**data`` gets the columns that it names; the four of the contract are passed by
    position.
    """

    def __init__(self, function: RewardFunction) -> None:
        self.function = function
        inner = function.func if isinstance(function, functools.partial) else function
        self.is_instant = any(inner is known for known in INSTANT)
        self.is_async = inspect.iscoroutinefunction(inner)
        self._taken = set(CONTRACT)
        self._named: frozenset[str] | None = None
        self._is_looked_up = False

    def __call__(self, arguments: Sequence[Any], data: Mapping[str, Any]) -> Any:
        if not self._is_looked_up:
            self._look_up()
        columns = {
            name: value
            for name, value in data.items()
            if name not in self._taken and (self._named is None or name in self._named)
        }
        return self.function(*arguments, **columns)

    def _look_up(self) -> None:
        parameters = list(inspect.signature(self.function).parameters.values())
        if isinstance(self.function, functools.partial):
            self._taken.update(self.function.keywords)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            self._named = frozenset(p.name for p in parameters[len(CONTRACT) :])
        self._is_looked_up = True
