"""A look at a data file before a run: columns, lengths, and rows that would be trouble.

What belongs here: counting and naming. Rows are read and tokenised by the functions that a run
uses; chat templates are examined in ``lint_template.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tandem.config.schema import DataConfig
from tandem.data.demonstrations import ANSWER_COLUMNS, Demonstration, row_demonstrations
from tandem.data.prompts import render_prompt
from tandem.data.sources import Row, Rows, problem_key, read_rows
from tandem.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KINDS: tuple[tuple[str, frozenset[str]], ...] = (
    ("preference pairs", frozenset({"chosen", "rejected"})),
    ("labelled completions", frozenset({"prompt", "completion", "label"})),
    ("conversations", frozenset({"messages"})),
)
"""What a file is for, by its columns; the first that fits."""


@dataclass(slots=True)
class Column:
    """One column: in how many rows it is, and of which types its values are."""

    present: int = 0
    types: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Problem:
    """Something found in ``count`` rows; ``example`` is where first. Errors stop a run."""

    what: str
    count: int
    example: str
    is_error: bool


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a row: smallest, median, 95th percentile, largest."""

    min: int
    median: int
    p95: int
    max: int

    @classmethod
    def of(cls, lengths: list[int]) -> Lengths:
        ordered = sorted(lengths)
        last = len(ordered) - 1
        return cls(ordered[0], ordered[last // 2], ordered[round(last * 0.95)], ordered[-1])


@dataclass(frozen=True, slots=True)
class Report:
    name: str
    kind: str
    num_rows: int
    columns: dict[str, Column]
    problems: tuple[Problem, ...]
    prompt_lengths: Lengths | None = None
    row_lengths: Lengths | None = None

    @property
    def has_errors(self) -> bool:
        return any(problem.is_error for problem in self.problems)


def lint_file(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    max_length: int | None = None,
) -> Report:
    """Read every row of ``config`` and say what is in it; with a tokenizer, in tokens too.

    Raises:
        DataError: the file cannot be read at all.
    """
    source = read_rows(config)
    found = _Findings()
    columns: dict[str, Column] = {}
    prompts: list[int] = []
    whole: list[int] = []
    seen: dict[str, str] = {}
    for index, row in enumerate(source.rows):
        where = source.where(index)
        _count_columns(columns, row)
        _check_text(found, row, where)
        key = problem_key(row)
        if key in seen:
            found.add("the same prompt as an earlier row", f"{where} (as {seen[key]})")
        seen.setdefault(key, where)
        if tokenizer is not None:
            _measure(found, row, config, tokenizer, where, max_length, prompts, whole)
    _check_columns(found, columns, source)
    return Report(
        name=source.name,
        kind=_kind(columns),
        num_rows=len(source),
        columns=columns,
        problems=found.problems(),
        prompt_lengths=Lengths.of(prompts) if prompts else None,
        row_lengths=Lengths.of(whole) if whole else None,
    )


class _Findings:
    """Counts of problems by what they are, in order of appearance."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        self._errors: set[str] = set()

    def add(self, what: str, example: str, *, is_error: bool = False) -> None:
        self._counts[what] += 1
        self._examples.setdefault(what, example)
        if is_error:
            self._errors.add(what)

    def problems(self) -> tuple[Problem, ...]:
        return tuple(
            Problem(what, count, self._examples[what], what in self._errors)
            for what, count in self._counts.items()
        )


def _count_columns(columns: dict[str, Column], row: Row) -> None:
    for name, value in row.items():
        column = columns.setdefault(str(name), Column())
        column.present += 1
        column.types["null" if value is None else type(value).__name__] += 1


def _check_columns(found: _Findings, columns: Mapping[str, Column], source: Rows) -> None:
    for name, column in columns.items():
        if column.present < len(source):
            found.add(f"column {name!r} is missing from some rows", f"{source.name}")
        kinds = {kind for kind in column.types if kind not in ("null", "int", "float")}
        if len(kinds) > 1:
            spelt = ", ".join(f"{count} {kind}" for kind, count in column.types.items())
            found.add(f"column {name!r} holds several types ({spelt})", f"{source.name}")


def _check_text(found: _Findings, row: Row, where: str) -> None:
    for name, text in _texts(row):
        if not text.strip():
            found.add(f"column {name!r} is empty or white space", where)
        if not text.isascii():
            found.add(f"column {name!r} has characters beyond ASCII", where)
        if "\ufffd" in text or any("\ud800" <= char <= "\udfff" for char in text):
            found.add(f"column {name!r} has a broken character", where)


def _texts(row: Row) -> Iterator[tuple[str, str]]:
    """The texts of a row that a model reads or writes, with their columns."""
    for name in ("prompt", "question", "messages", "chosen", "rejected", *ANSWER_COLUMNS):
        value = row.get(name)
        if isinstance(value, str):
            yield name, value
        elif isinstance(value, list):
            for message in value:
                content = message.get("content") if isinstance(message, Mapping) else None
                if isinstance(content, str):
                    yield name, content


def _measure(
    found: _Findings,
    row: Row,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    max_length: int | None,
    prompts: list[int],
    whole: list[int],
) -> None:
    """Tokenise one row as a run would, and note its lengths and what stands in the way."""
    try:
        rows = _demonstrations(row, config, tokenizer, where)
        if not rows:
            prompt_ids = render_prompt(row, config, tokenizer, where)[1]
            rows = [Demonstration(prompt_ids, (False,) * len(prompt_ids))]
    except (DataError, ConfigError) as error:
        found.add(_shortened(str(error), where), where, is_error=True)
        return
    if len(rows) > 1:
        found.add("the chat template rewrites earlier turns: one row becomes several", where)
    for item in rows:
        targets = sum(item.loss_mask)
        first = item.loss_mask.index(True) if targets else len(item.input_ids)
        prompts.append(first)
        whole.append(len(item.input_ids))
        bos = tokenizer.bos_token_id
        if bos is not None and item.input_ids[:2] == (bos, bos):
            found.add("the row begins with two BOS tokens", where, is_error=True)
        if max_length is not None and len(item.input_ids) > max_length:
            found.add(f"longer than {max_length} tokens", where)
            if targets and first >= max_length:
                found.add("no target token left after truncation", where)


def _demonstrations(
    row: Row, config: DataConfig, tokenizer: PreTrainedTokenizerBase, where: str
) -> list[Demonstration]:
    """The row with its answer; none for a prompt without one. Pairs are two answers."""
    if "chosen" in row and "rejected" in row:
        pair = [{**row, "answer": row[name]} for name in ("chosen", "rejected")]
        if "prompt" not in row and "question" not in row:
            pair = [{"messages": row[name]} for name in ("chosen", "rejected")]
        return [item for one in pair for item in row_demonstrations(one, config, tokenizer, where)]
    messages = row.get("messages")
    is_spoken = isinstance(messages, list) and any(
        isinstance(message, Mapping) and message.get("role") == "assistant" for message in messages
    )
    if is_spoken or any(name in row for name in ANSWER_COLUMNS):
        return row_demonstrations(row, config, tokenizer, where)
    return []


def _shortened(message: str, where: str) -> str:
    """The same words for the same problem in any row."""
    return message.replace(f"{where}: ", "").replace(where, "this row")[:200]


def _kind(columns: Mapping[str, Any]) -> str:
    for kind, needed in KINDS:
        if needed <= set(columns):
            return kind
    if {"data_source", "reward_model"} & set(columns):
        return "prompts with a reward (verl)"
    asked = {"prompt", "question"} & set(columns)
    if not asked:
        return "unknown"
    return "prompts and answers" if set(ANSWER_COLUMNS) & set(columns) else "prompts"
