"""The trajectories of a store as records for other programs: JSONL, or parquet.

One record a trajectory; an attempt without rows (rejected, failed) is one record without tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from tandem.errors import ConfigError
from tandem.rollout.encoding import unpack_rows
from tandem.store import Content, Query, StoredEpisode, TrajectoryStore
from tandem.types import EPISODE_STRIDE

Format = Literal["jsonl", "parquet"]
CHUNK = 256
"""Records that are in memory at once."""


def export_rollouts(
    store: TrajectoryStore, path: Path | str, query: Query, *, format: Format | None = None
) -> int:
    """Write the trajectories that ``query`` finds; returns the number of records.

    ``format`` None: by the ending of ``path``. An existing file is replaced when all is written.

    Raises:
        ConfigError: another ending, or ``path`` cannot be written.
    """
    path = Path(path)
    kind = format or {".jsonl": "jsonl", ".parquet": "parquet"}.get(path.suffix)
    if kind is None:
        raise ConfigError(f"--out: got {str(path)!r}, allowed: a name in .jsonl or .parquet")
    staged = path.with_name(f".{path.name}.new")
    write = _write_jsonl if kind == "jsonl" else _write_parquet
    try:
        number = write(staged, records(store, query))
        staged.replace(path)
    except OSError as error:
        raise ConfigError(f"--out: cannot write {str(path)!r} ({error.strerror})") from error
    finally:
        staged.unlink(missing_ok=True)
    return number


def records(store: TrajectoryStore, query: Query) -> Iterator[dict[str, Any]]:
    """One flat record a trajectory, in the order in which attempts ended."""
    for episode in store.find(query):
        content = store.content(episode.key)
        head = _head(episode, content)
        if content.rows is None:
            yield head | dict.fromkeys(_TOKEN_COLUMNS) | dict.fromkeys(_ROW_COLUMNS)
        else:
            for row in _rows(episode, content, content.rows):
                yield head | row


_TOKEN_COLUMNS = ("input_ids", "loss_mask", "logprobs", "versions")
_ROW_COLUMNS = ("sample", "completion", "reward", "truncated", "temperature")


def _head(episode: StoredEpisode, content: Content) -> dict[str, Any]:
    epoch, position = divmod(episode.episode_id, EPISODE_STRIDE)
    return {
        "epoch": epoch,
        "position": position,
        "attempt": episode.attempt,
        "state": episode.state.value,
        "reason": episode.reason,
        "step": episode.step,
        "incarnation": episode.incarnation,
        "prompt": content.prompt,
    }


def _rows(episode: StoredEpisode, content: Content, data: bytes) -> Iterator[dict[str, Any]]:
    rows = unpack_rows(data, episode_id=episode.episode_id, attempt=episode.attempt)
    for row in rows:
        inside = row["attention_mask"]
        sample = int(row["sample_ids"])
        reward = float(row["rewards"])
        known = 0 <= sample < len(content.completions)
        yield {name: row[name][inside].tolist() for name in _TOKEN_COLUMNS} | {
            "sample": sample,
            "completion": content.completions[sample] if known else None,
            "reward": None if reward != reward else reward,
            "truncated": bool(row["truncated"]),
            "temperature": float(row["temperature"]),
        }


def _write_jsonl(path: Path, found: Iterator[dict[str, Any]]) -> int:
    number = 0
    with path.open("w", encoding="utf-8") as file:
        for record in found:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            number += 1
    return number


def _write_parquet(path: Path, found: Iterator[dict[str, Any]]) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    text, whole, single = pa.string(), pa.int64(), pa.float32()
    columns = {
        **dict.fromkeys(("epoch", "position", "attempt", "step", "sample"), whole),
        **dict.fromkeys(("state", "reason", "incarnation", "prompt", "completion"), text),
        **dict.fromkeys(("reward", "temperature"), single),
        "truncated": pa.bool_(),
        "input_ids": pa.list_(whole),
        "loss_mask": pa.list_(pa.bool_()),
        "logprobs": pa.list_(single),
        "versions": pa.list_(whole),
    }
    schema = pa.schema(list(columns.items()))
    number = 0
    with pq.ParquetWriter(path, schema) as writer:
        chunk: list[dict[str, Any]] = []
        for record in found:
            chunk.append(record)
            number += 1
            if len(chunk) == CHUNK:
                writer.write_table(pa.Table.from_pylist(chunk, schema=schema))
                chunk = []
        writer.write_table(pa.Table.from_pylist(chunk, schema=schema))
    return number
