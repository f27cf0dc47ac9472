"""Rows from procedural tasks and files, checked before anything heavy is loaded.

What belongs here: reading, renaming columns, and splitting. What a row looks like as tokens is
decided in ``prompts.py`` and ``demonstrations.py``. This file imports no torch.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tandem.config.schema import DataConfig
from tandem.errors import ConfigError, DataError

Row = Mapping[str, Any]

HELDOUT_BUCKETS = 10
"""One problem in this many is held out: the one whose hash falls into bucket 0."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows and where they come from, for errors. ``numbers`` are those of the source, from 1."""

    name: str
    rows: Sequence[Row]
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, index: int) -> str:
        return f"{self.name}, row {self.numbers[index]}"


def read_rows(config: DataConfig) -> Rows:
    """Every row of the configured source, with the columns renamed and the split taken.

    A row of ``reasoning_gym`` has ``question``, ``answer``, ``task``, ``task_kwargs`` and ``entry``
    (what the task's own scorer takes), and the plain values of the task's metadata as columns. A
    row with ``reward_model.ground_truth`` and no ``answer`` gets that as its answer.

    Raises:
        ConfigError: unknown task or task setting.
        DataError: missing, unreadable or empty data, or a missing column.
    """
    name, numbered = _read(config)
    kept: Iterator[tuple[int, Row]] = (
        (number, _renamed(row, config, f"{name}, row {number}")) for number, row in numbered
    )
    if config.split != "all":
        heldout = config.split == "heldout"
        kept = (item for item in kept if is_heldout(problem_key(item[1])) == heldout)
        kept = _distinct(kept) if heldout else kept
    selected = list(islice(kept, config.size))
    if not selected:
        split = "" if config.split == "all" else f" in split {config.split!r}"
        raise DataError(f"{name}: the dataset has no rows{split}")
    if config.source == "reasoning_gym" and len(selected) < (config.size or 0):
        raise DataError(
            f"{name}: found {len(selected)} distinct {config.split} problems, data.size asks for "
            f"{config.size}; lower it or widen data.task_kwargs"
        )
    return Rows(name, [row for _, row in selected], [number for number, _ in selected])


def problem_key(row: Row) -> str:
    """What makes two rows the same problem: the question, else the prompt or messages."""
    for column in ("question", "prompt", "messages"):
        if column in row:
            value = row[column]
            return (
                value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
            )
    return json.dumps(dict(row), sort_keys=True, default=str)


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def is_heldout(key: str) -> bool:
    """Whether a problem belongs to the held-out split, whatever the seed that generated it."""
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") % HELDOUT_BUCKETS == 0


def missing_columns(row: Row, needed: str, where: str) -> DataError:
    """The error for a row without a column; ``needed`` spells the column or the alternatives."""
    return DataError(
        f"{where}: missing column {needed}; present: {', '.join(map(str, row)) or 'none'}; "
        "map it with data.columns, e.g. data.columns.answer=solution"
    )


def _distinct(numbered: Iterable[tuple[int, Row]]) -> Iterator[tuple[int, Row]]:
    seen: set[str] = set()
    for number, row in numbered:
        if (key := problem_key(row)) not in seen:
            seen.add(key)
            yield number, row


def _renamed(row: Row, config: DataConfig, where: str) -> Row:
    if config.columns:
        renamed = {
            ours: _column(row, theirs, f"{theirs!r} (data.columns.{ours})", where)
            for ours, theirs in config.columns.items()
        }
        sources = set(config.columns.values())
        row = {**{key: value for key, value in row.items() if key not in sources}, **renamed}
    return _with_ground_truth(row)


def _column(row: Row, name: str, spelt: str, where: str) -> Any:
    """A column, or with a dotted name a value inside one (``reward_model.ground_truth``)."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise missing_columns(row, spelt, where)
        value = value[part]
    return value


def _with_ground_truth(row: Row) -> Row:
    """verl keeps the answer in ``reward_model.ground_truth``; it is our ``answer``, if none is."""
    judge = row.get("reward_model")
    if "answer" in row or not isinstance(judge, Mapping) or "ground_truth" not in judge:
        return row
    return {**row, "answer": judge["ground_truth"]}


def _read(config: DataConfig) -> tuple[str, Iterator[tuple[int, Row]]]:
    if config.source == "reasoning_gym":
        return f"reasoning_gym task {config.task!r}", _procedural(config)
    path = Path(config.path or "").expanduser()
    if not path.exists():
        raise DataError(f"data.path: no such file or directory: {str(path)!r}")
    readers = {"jsonl": _jsonl, "parquet": _parquet, "dataset": _dataset}
    return str(path), readers[config.source](path)


def _procedural(config: DataConfig) -> Iterator[tuple[int, Row]]:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    assert config.task is not None
    assert config.size is not None
    if config.task not in DATASETS:
        close = difflib.get_close_matches(config.task, DATASETS, n=3)
        hint = f"did you mean {', '.join(close)}?" if close else "see reasoning_gym for the names"
        raise ConfigError(f"data.task: unknown task {config.task!r}; {hint}")
    # Splits take a part of what is generated, so more is generated than asked for.
    limit = config.size if config.split == "all" else 4 * HELDOUT_BUCKETS * config.size + 1000
    settings = {**config.task_kwargs, "seed": config.seed, "size": limit}
    try:
        dataset = reasoning_gym.create_dataset(config.task, **settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"data.task_kwargs of task {config.task!r}: got {config.task_kwargs!r}: {error}"
        ) from error
    for index in range(limit):
        entry = dataset[index]
        extra = {k: v for k, v in entry["metadata"].items() if isinstance(v, str | int | float)}
        yield (
            index + 1,
            {
                **extra,
                "question": entry["question"],
                "answer": entry["answer"],
                "task": config.task,
                "task_kwargs": config.task_kwargs,
                "entry": entry,
            },
        )


def _jsonl(path: Path) -> Iterator[tuple[int, Row]]:
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _json_row(line, number, path)
    except OSError as error:
        raise DataError(f"data.path: {str(path)!r}: {error.strerror}") from error


def _json_row(line: bytes, number: int, path: Path) -> Row:
    where = f"{path}, line {number}"
    try:
        row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object, got {type(row).__name__}")
    return row


def _parquet(path: Path) -> Iterator[tuple[int, Row]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"data.path: {str(path)!r} is not a parquet file: {error}") from error
    yield from enumerate(rows, start=1)


def _dataset(path: Path) -> Iterator[tuple[int, Row]]:
    import datasets

    try:
        found = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DataError(
            f"data.path: {str(path)!r} is not a dataset saved with save_to_disk: {error}"
        ) from error
    if isinstance(found, datasets.DatasetDict):
        raise DataError(
            f"data.path: {str(path)!r} holds several splits ({', '.join(found)}); "
            "give the directory of one"
        )
    yield from enumerate(found, start=1)
