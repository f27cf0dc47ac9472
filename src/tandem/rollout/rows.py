"""Rows of an episode: checked when a workflow returns them, joined when a batch is handed over.

Tensors only; states and clocks are the executor's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict

from tandem.data.batch import concat_batches
from tandem.errors import DataError

REQUIRED_PER_TOKEN = {
    "attention_mask": torch.bool,
    "loss_mask": torch.bool,
    "logprobs": torch.float32,
    "versions": torch.int64,
}


def check_rows(rows: Any, episode_id: int, attempt: int, *, temperature: float = 1.0) -> TensorDict:
    """A copy of what a workflow returned with ids of its episode, or ``DataError`` saying why not.

    What the workflow left out is filled in: ``group_ids`` and ``sample_ids`` (one group, one
    trajectory a row), ``truncated`` (none is) and ``temperature`` (the configured one).
    """
    where = f"rows of episode {episode_id}"
    if not isinstance(rows, TensorDict):
        raise DataError(f"{where}: got {type(rows).__name__}, allowed: TensorDict or None")
    if len(rows.batch_size) != 1 or rows.batch_size[0] < 1:
        raise DataError(
            f"{where}: batch_size {list(rows.batch_size)}, allowed: [B], B >= 1; return None to "
            "reject an episode"
        )
    rows = rows.copy()
    num_rows = rows.batch_size[0]
    shape = _require(rows, "input_ids", torch.int64, where)
    if len(shape) != 2 or shape[1] < 1:
        raise DataError(f"{where}: input_ids has shape {list(shape)}, allowed: [B, T], T >= 1")
    for key, dtype in REQUIRED_PER_TOKEN.items():
        if (received := _require(rows, key, dtype, where)) != shape:
            raise DataError(f"{where}: {key} has shape {list(received)}, allowed: {list(shape)}")
    if (received := _require(rows, "rewards", torch.float32, where)) != (num_rows,):
        raise DataError(f"{where}: rewards has shape {list(received)}, allowed: [{num_rows}]")
    if bool(rows["rewards"].isinf().any()):
        raise DataError(f"{where}: a reward is infinite, allowed: finite numbers, NaN for no score")
    _check_trained_tokens(rows, where)
    defaults = {
        "group_ids": torch.full((num_rows,), episode_id),
        "sample_ids": torch.arange(num_rows),
        "truncated": torch.zeros(num_rows, dtype=torch.bool),
        "temperature": torch.full((num_rows,), temperature),
    }
    for key, default in defaults.items():
        if key not in rows:
            rows[key] = default
        elif _require(rows, key, default.dtype, where) != (num_rows,):
            raise DataError(f"{where}: {key} has another shape than [{num_rows}]")
    rows["episode_ids"] = torch.full((num_rows,), episode_id, dtype=torch.int64)
    rows["attempt"] = torch.full((num_rows,), attempt, dtype=torch.int64)
    return rows


def _require(rows: TensorDict, key: str, dtype: torch.dtype, where: str) -> tuple[int, ...]:
    value = rows.get(key, None)
    if not isinstance(value, torch.Tensor):
        raise DataError(f"{where}: {key} is missing; a workflow returns it as {dtype}")
    if value.dtype != dtype:
        raise DataError(f"{where}: {key} is {value.dtype}, allowed: {dtype}")
    return tuple(value.shape)


def _check_trained_tokens(rows: TensorDict, where: str) -> None:
    mask = rows["loss_mask"]
    if bool((mask & ~rows["attention_mask"]).any()):
        raise DataError(f"{where}: loss_mask covers padding")
    if bool(mask[:, 0].any()):
        raise DataError(f"{where}: loss_mask covers token 0, which has no prediction")
    if bool((rows["versions"][mask] < 0).any()):
        raise DataError(f"{where}: a trained token has no version; only sampled tokens are trained")
    if not bool(torch.isfinite(rows["logprobs"][mask]).all()):
        raise DataError(f"{where}: a trained token has a log-probability that is not finite")


def trained_versions(rows: TensorDict) -> tuple[int | None, int | None]:
    """Oldest and newest version of the trained tokens; None when there are none."""
    versions = rows["versions"][rows["loss_mask"]]
    if versions.numel() == 0:
        return None, None
    return int(versions.min()), int(versions.max())


@dataclass(frozen=True, slots=True)
class Staleness:
    """Lag of the trained tokens of one batch behind the version that trains them."""

    max: int
    mean: float
    masked_tokens: int


def join_rows(
    episodes: Sequence[TensorDict], *, version: int | None = None, max_staleness: int = 0
) -> tuple[TensorDict, Staleness]:
    """One batch of all rows; with ``version``, tokens older than ``max_staleness`` leave the mask.

    ``sample_ids`` are numbered anew, so that equal numbers of two episodes do not meet.
    """
    parts, masked, first = [], 0, 0
    for rows in episodes:
        part = rows.copy()
        _, local = torch.unique(part["sample_ids"], return_inverse=True)
        part["sample_ids"] = local + first
        first += int(local.max()) + 1
        if version is not None:
            fresh = part["versions"] >= version - max_staleness
            masked += int((part["loss_mask"] & ~fresh).sum())
            part["loss_mask"] = part["loss_mask"] & fresh
        parts.append(part)
    batch = concat_batches(parts)
    lags = (version or 0) - batch["versions"][batch["loss_mask"]]
    if version is None or lags.numel() == 0:
        return batch, Staleness(0, 0.0, masked)
    return batch, Staleness(int(lags.max()), float(lags.float().mean()), masked)
