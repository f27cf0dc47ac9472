"""Preferences for training: pairs of token rows, and single rows that were liked or not.

What belongs here: the columns of preference data, pairs made from a task's answers, what of a
conversation is the prompt, and which pairs are left out. Putting them into tensors is done by the
trainers with ``batch.py``; their order is in ``examples.py``.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from tandem.config.schema import DataConfig, StageConfig
from tandem.data.demonstrations import (
    ANSWER_COLUMNS,
    Demonstration,
    conversation,
    fit_row,
    masked,
    nothing_usable,
)
from tandem.data.examples import ExampleSource
from tandem.data.noise import load_noise
from tandem.data.prompts import ids_digest, render_prompt
from tandem.data.sources import Row, missing_columns, read_rows
from tandem.data.text import Message, check_messages, encode, encode_prompt, fill, text_of
from tandem.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT_COLUMNS = ("prompt", "question", "messages")
REFERENCE_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")
DRAWS = 8
"""How often a mistake is drawn before a problem is given up as one that has none."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two responses to one prompt; targets are the response's tokens.

    ``margin`` says by how much the chosen one is better, ``reference`` is the reference policy's
    log-probability of the chosen and the rejected response; None where the data have none.
    """

    chosen: Demonstration
    rejected: Demonstration
    margin: float | None = None
    reference: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """One response and whether it was liked."""

    row: Demonstration
    is_desirable: bool


def open_pairs(
    config: StageConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int = 0,
    data: DataConfig | None = None,
    needs_prompt: bool = True,
    needs_reference: bool = False,
) -> ExampleSource[Pair]:
    """Read and tokenise every pair of ``data`` (None: ``config.data``).

    Columns: ``chosen`` and ``rejected``, texts beside a ``prompt``, or messages with a ``prompt``
    of messages or without one; then the prompt is what both conversations begin with. Without
    ``needs_prompt`` texts may stand alone. Optional: ``margin``; with ``needs_reference`` also
    ``ref_chosen_logps`` and ``ref_rejected_logps``. Or ``answer`` (or ``response``,
    ``completion``), of which ``data.answer_noise`` makes the rejected one, the same in every epoch.

    Each row has a budget of its own: ``max_length``, and half of ``max_tokens_per_microbatch``,
    because a pair stays together. Pairs that lose a response to it, and pairs of equal responses,
    are left out and counted.

    Raises:
        ConfigError: a setting that the tokenizer or the data cannot honour.
        DataError: bad data, a row too long under ``overlong="error"``, or no usable pair left.
    """
    source = read_rows(data or config.data)
    reader = _Reader(data or config.data, tokenizer, seed, needs_prompt=needs_prompt)
    limit = min(config.max_length, config.train.max_tokens_per_microbatch // 2)
    dropped: Counter[str] = Counter()
    pairs: list[Pair] = []
    for index, row in enumerate(source.rows):
        where = source.where(index)
        fitted = _fit_pair(reader.pair(row, where, index), limit, config.overlong, where, dropped)
        if fitted is not None:
            reference = _reference_of(row, where) if needs_reference else None
            pairs.append(Pair(*fitted, _margin_of(row, where), reference))
    if not pairs:
        raise nothing_usable(source, config, dropped)
    if len({pair.margin is None for pair in pairs}) > 1:
        raise DataError(f"{source.name}: some rows have a margin and some have none")
    ids = (row.input_ids for pair in pairs for row in (pair.chosen, pair.rejected))
    return ExampleSource(
        pairs,
        digest=ids_digest(ids),
        seed=(seed, (data or config.data).seed),
        shuffle=(data or config.data).shuffle,
        dropped=dropped,
    )


def open_judged(
    config: StageConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int = 0,
    data: DataConfig | None = None,
) -> ExampleSource[Judged]:
    """Read and tokenise every judged response of ``data`` (None: ``config.data``).

    Columns: a prompt, ``completion`` (or ``answer``, ``response``; text, or messages) and
    ``label``, true where it was liked. Rows without ``label`` are read as pairs, which give one
    liked and one disliked response each. Errors as in ``open_pairs``.
    """
    source = read_rows(data or config.data)
    reader = _Reader(data or config.data, tokenizer, seed, needs_prompt=True)
    limit = min(config.max_length, config.train.max_tokens_per_microbatch)
    dropped: Counter[str] = Counter()
    found: list[Judged] = []
    for index, row in enumerate(source.rows):
        where = source.where(index)
        if "label" in row:
            judged = [Judged(reader.single(row, where), _label_of(row, where))]
        else:
            chosen, rejected = reader.pair(row, where, index)
            judged = [Judged(chosen, True), Judged(rejected, False)]
        for item in judged:
            fitted = fit_row(item.row, limit, config.overlong, where, dropped)
            if fitted is not None:
                found.append(Judged(fitted, item.is_desirable))
    if not found:
        raise nothing_usable(source, config, dropped)
    ids = ((*item.row.input_ids, int(item.is_desirable)) for item in found)
    return ExampleSource(
        found,
        digest=ids_digest(ids),
        seed=(seed, (data or config.data).seed),
        shuffle=(data or config.data).shuffle,
        dropped=dropped,
    )


class _Reader:
    """Responses of one data source as token rows."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        *,
        needs_prompt: bool,
    ) -> None:
        self._config, self._tokenizer, self._seed = config, tokenizer, seed
        self._needs_prompt = needs_prompt
        self._noise: Callable[[Row, Random], str] | None = None
        if config.answer_noise is not None:
            self._noise = load_noise(config.answer_noise, config.answer_noise_kwargs)
        elif config.answer_template is not None:
            raise ConfigError(
                "data.answer_template: only for pairs that data.answer_noise makes; other "
                "responses are taken as they are"
            )

    def pair(self, row: Row, where: str, index: int) -> tuple[Demonstration, Demonstration]:
        chosen, rejected = self._responses(row, where, index)
        if isinstance(chosen, str) and isinstance(rejected, str):
            return self._text(row, chosen, where), self._text(row, rejected, where)
        if isinstance(chosen, str) or isinstance(rejected, str):
            raise DataError(f"{where}: chosen, rejected: expected two texts or two message lists")
        chosen = check_messages(chosen, f"{where}: chosen")
        rejected = check_messages(rejected, f"{where}: rejected")
        prompt = self._message_prompt(row, where)
        if prompt is None:
            prompt = _common_prefix(chosen, rejected, where)
        return self._messages(prompt, chosen, where), self._messages(prompt, rejected, where)

    def single(self, row: Row, where: str) -> Demonstration:
        if self._noise is not None:
            raise ConfigError("data.answer_noise: not for rows with a label")
        column = next((name for name in ANSWER_COLUMNS[::-1] if name in row), None)
        if column is None:
            raise missing_columns(row, "'completion' (or 'answer', 'response')", where)
        if isinstance(row[column], str):
            return self._text(row, row[column], where)
        prompt = self._message_prompt(row, where)
        if prompt is None:
            raise DataError(f"{where}: prompt: expected messages, as {column} has them")
        return self._messages(prompt, check_messages(row[column], where), where)

    def _responses(self, row: Row, where: str, index: int) -> tuple[Any, Any]:
        if self._noise is not None:
            if "chosen" in row or "rejected" in row:
                raise ConfigError(f"data.answer_noise: {where} has its own chosen and rejected")
            return self._made(row, where, index)
        for column in ("chosen", "rejected"):
            if column not in row:
                raise missing_columns(row, repr(column), where)
        return row["chosen"], row["rejected"]

    def _made(self, row: Row, where: str, index: int) -> tuple[str, str]:
        """The answer and a wrong one; twice the answer where no mistake was found."""
        assert self._noise is not None
        column = next((name for name in ANSWER_COLUMNS if name in row), None)
        if column is None:
            raise missing_columns(row, "'answer' (or 'response', 'completion')", where)
        right = text_of(row, column, where)
        template = self._config.answer_template or "{answer}"
        rng = Random(f"{self._seed}:{self._config.seed}:{index}")
        for _ in range(DRAWS):
            wrong = self._noise({**row, "answer": right}, rng)
            if not _is_right(row, wrong, right):
                break
        else:
            wrong = right
        filled = [fill(template, {**row, "answer": answer}, where) for answer in (right, wrong)]
        return filled[0], filled[1]

    def _text(self, row: Row, text: str, where: str) -> Demonstration:
        tokenizer = self._tokenizer
        has_prompt = self._config.prompt_template is not None or any(
            column in row for column in PROMPT_COLUMNS
        )
        if not has_prompt and not self._needs_prompt and not self._config.chat:
            ids = (*encode_prompt(tokenizer, text, where), int(tokenizer.eos_token_id))
            return masked(ids, [True] * len(ids))
        prompt, prompt_ids = render_prompt(row, self._config, tokenizer, where)
        if not isinstance(prompt, str):
            return self._messages(prompt, [{"role": "assistant", "content": text}], where)
        ids = (*encode(tokenizer, text, where), int(tokenizer.eos_token_id))
        return masked([*prompt_ids, *ids], [False] * len(prompt_ids) + [True] * len(ids))

    def _message_prompt(self, row: Row, where: str) -> list[Message] | None:
        """The prompt beside responses that are messages; None: it is in them."""
        if self._config.prompt_template is not None:
            raise ConfigError(f"data.prompt_template: {where} has responses that are messages")
        prompt = row.get("prompt")
        # A text beside whole conversations repeats what they begin with.
        return None if prompt is None or isinstance(prompt, str) else check_messages(prompt, where)

    def _messages(
        self, prompt: list[Message], response: list[Message], where: str
    ) -> Demonstration:
        if response[: len(prompt)] == prompt:
            response = response[len(prompt) :]
        system: list[Message] = []
        if self._config.system_prompt is not None and prompt[0]["role"] != "system":
            system = [{"role": "system", "content": self._config.system_prompt}]
        before = [*system, *prompt]
        return conversation([*before, *response], self._tokenizer, where, first_target=len(before))


def _common_prefix(chosen: list[Message], rejected: list[Message], where: str) -> list[Message]:
    length = 0
    for one, other in zip(chosen, rejected, strict=False):
        if one != other:
            break
        length += 1
    if length in (0, len(chosen), len(rejected)):
        problem = "begin differently" if length == 0 else "do not differ"
        raise DataError(
            f"{where}: chosen and rejected {problem}; expected a common prompt and two responses, "
            "or a column prompt"
        )
    return chosen[:length]


def _fit_pair(
    pair: tuple[Demonstration, Demonstration],
    limit: int,
    policy: str,
    where: str,
    dropped: Counter[str],
) -> tuple[Demonstration, Demonstration] | None:
    """Both rows within the limit, or None: left out, counted once."""
    lost: Counter[str] = Counter()
    chosen, rejected = (fit_row(row, limit, policy, where, lost) for row in pair)
    if chosen is None or rejected is None:
        dropped[next(iter(lost))] += 1
        return None
    if chosen.input_ids == rejected.input_ids:
        dropped["equal responses"] += 1
        return None
    return chosen, rejected


def _is_right(row: Row, answer: str, right: str) -> bool:
    """Whether a made-up answer is right after all, by the task's own scorer where there is one."""
    if answer.strip() == right.strip():
        return True
    if "task" not in row or "entry" not in row:
        return False
    return bool(_scorer(row["task"])(answer, row["entry"]) >= 1.0)


@functools.cache
def _scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    from reasoning_gym import get_score_answer_fn

    scorer: Callable[[str, dict[str, Any]], float] = get_score_answer_fn(task)
    return scorer


def _margin_of(row: Row, where: str) -> float | None:
    if row.get("margin") is None:
        return None
    return _number(row, "margin", where)


def _reference_of(row: Row, where: str) -> tuple[float, float]:
    for column in REFERENCE_COLUMNS:
        if column not in row:
            raise missing_columns(row, repr(column), where)
    chosen, rejected = (_number(row, column, where) for column in REFERENCE_COLUMNS)
    return chosen, rejected


def _number(row: Row, column: str, where: str) -> float:
    value = row[column]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise DataError(f"{where}: column {column!r}: expected a finite number, got {value!r}")
    return float(value)


def _label_of(row: Row, where: str) -> bool:
    value = row["label"]
    if not isinstance(value, bool | int) or value not in (0, 1):
        raise DataError(f"{where}: column 'label': expected true or false, got {value!r}")
    return bool(value)
