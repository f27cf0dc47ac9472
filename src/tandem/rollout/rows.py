"""Rows of an episode: checked when a workflow returns them, joined when a batch is handed over.

Tensors only; states and clocks are the executor's, bytes are ``encoding``'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
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


PER_ROW = {
    "group_ids": torch.int64,
    "sample_ids": torch.int64,
    "truncated": torch.bool,
    "temperature": torch.float32,
}
"""What a workflow may leave out."""


@dataclass(frozen=True, slots=True)
class RowFacts:
    """What the executor and the store want to know of the rows of one episode.

    ``oldest``/``newest``: versions of all generated tokens, ``trained_oldest``/``trained_newest``
    of the trained ones; None without any. ``reward``: mean of the scored rows. ``squared_lengths``:
    sum over rows of the squared number of trained tokens.
    """

    num_rows: int
    num_trained: int
    reward: float | None
    oldest: int | None
    newest: int | None
    trained_oldest: int | None
    trained_newest: int | None
    squared_lengths: int


NO_ROWS = RowFacts(0, 0, None, None, None, None, None, 0)


def check_rows(
    rows: Any, episode_id: int, attempt: int, *, temperature: float = 1.0
) -> tuple[TensorDict, RowFacts]:
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
    # A plain dict: every access to a TensorDict costs as much as a check.
    tensors = dict(rows.items())
    num_rows = rows.batch_size[0]
    shape = _require(tensors, "input_ids", torch.int64, where).shape
    if len(shape) != 2 or shape[1] < 1:
        raise DataError(f"{where}: input_ids has shape {list(shape)}, allowed: [B, T], T >= 1")
    per_token = {}
    for key, dtype in REQUIRED_PER_TOKEN.items():
        value = _require(tensors, key, dtype, where)
        if value.shape != shape:
            raise DataError(f"{where}: {key} has shape {list(value.shape)}, allowed: {list(shape)}")
        per_token[key] = value.numpy(force=True)
    rewards = _require(tensors, "rewards", torch.float32, where)
    if rewards.shape != (num_rows,):
        raise DataError(f"{where}: rewards has shape {list(rewards.shape)}, allowed: [{num_rows}]")
    facts = _facts(rewards.numpy(force=True), where, **per_token)
    _fill_in(tensors, num_rows, episode_id, temperature, where)
    tensors["episode_ids"] = torch.full((num_rows,), episode_id, dtype=torch.int64)
    tensors["attempt"] = torch.full((num_rows,), attempt, dtype=torch.int64)
    return TensorDict(tensors, batch_size=[num_rows]), facts


def _fill_in(
    tensors: dict[str, Any], num_rows: int, episode_id: int, temperature: float, where: str
) -> None:
    for key, dtype in PER_ROW.items():
        if key in tensors:
            if _require(tensors, key, dtype, where).shape != (num_rows,):
                raise DataError(f"{where}: {key} has another shape than [{num_rows}]")
        elif key == "sample_ids":
            tensors[key] = torch.arange(num_rows)
        else:
            value = {"group_ids": episode_id, "truncated": False, "temperature": temperature}[key]
            tensors[key] = torch.full((num_rows,), value, dtype=dtype)


def _require(tensors: Mapping[str, Any], key: str, dtype: torch.dtype, where: str) -> torch.Tensor:
    value = tensors.get(key)
    if not isinstance(value, torch.Tensor):
        raise DataError(f"{where}: {key} is missing; a workflow returns it as {dtype}")
    if value.dtype != dtype:
        raise DataError(f"{where}: {key} is {value.dtype}, allowed: {dtype}")
    return value


def _facts(
    rewards: np.ndarray[Any, Any],
    where: str,
    *,
    attention_mask: np.ndarray[Any, Any],
    loss_mask: np.ndarray[Any, Any],
    logprobs: np.ndarray[Any, Any],
    versions: np.ndarray[Any, Any],
) -> RowFacts:
    """Check the values and take what is worth knowing; in numpy, whose calls cost a third."""
    if (loss_mask > attention_mask).any():
        raise DataError(f"{where}: loss_mask covers padding")
    if loss_mask[:, 0].any():
        raise DataError(f"{where}: loss_mask covers token 0, which has no prediction")
    trained = versions[loss_mask]
    oldest, newest = _bounds(trained)
    if oldest is not None and oldest < 0:
        raise DataError(f"{where}: a trained token has no version; only sampled tokens are trained")
    if not np.isfinite(logprobs[loss_mask]).all():
        raise DataError(f"{where}: a trained token has a log-probability that is not finite")
    if np.isinf(rewards).any():
        raise DataError(f"{where}: a reward is infinite, allowed: finite numbers, NaN for no score")
    scored = rewards[rewards == rewards]
    made_oldest, made_newest = _bounds(versions[versions >= 0])
    return RowFacts(
        num_rows=len(rewards),
        num_trained=len(trained),
        reward=float(scored.sum(dtype=np.float64)) / len(scored) if len(scored) else None,
        oldest=made_oldest,
        newest=made_newest,
        trained_oldest=oldest,
        trained_newest=newest,
        squared_lengths=int((loss_mask.sum(1, dtype=np.int64) ** 2).sum()),
    )


def _bounds(versions: np.ndarray[Any, Any]) -> tuple[int | None, int | None]:
    if versions.size == 0:
        return None, None
    return int(versions.min()), int(versions.max())


@dataclass(frozen=True, slots=True)
class Staleness:
    """Lag of the trained tokens of one batch behind the version that trains them.

    ``trained_lengths`` is the sum, over ``trained_tokens``, of the length of each one's row.
    """

    max: int
    mean: float
    masked_tokens: int
    trained_tokens: int = 0
    trained_lengths: int = 0


def join_rows(
    episodes: Sequence[TensorDict], *, version: int | None = None, max_staleness: int = 0
) -> tuple[TensorDict, Staleness]:
    """One batch of all rows; with ``version``, tokens older than ``max_staleness`` leave the mask.

    ``sample_ids`` are numbered anew, so that equal numbers of two episodes do not meet.
    """
    batch = concat_batches(episodes)
    batch["sample_ids"] = _numbered(batch["sample_ids"], [len(rows) for rows in episodes])
    if version is None:
        return batch, Staleness(0, 0.0, 0)
    mask = batch["loss_mask"]
    fresh = batch["versions"] >= version - max_staleness
    batch["loss_mask"] = mask & fresh
    masked = int((mask & ~fresh).sum())
    trained_B = batch["loss_mask"].sum(-1)
    trained, lengths = int(trained_B.sum()), int((trained_B * mask.sum(-1)).sum())
    lags = version - batch["versions"][batch["loss_mask"]]
    if lags.numel() == 0:
        return batch, Staleness(0, 0.0, masked)
    mean = float(lags.float().mean())
    return batch, Staleness(int(lags.max()), mean, masked, trained, lengths)


def _numbered(sample_ids: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Numbers of (episode, sample): those of an episode in their order, episode after episode."""
    episodes = np.repeat(np.arange(len(sizes)), sizes)
    pairs = np.stack([episodes, sample_ids.numpy(force=True)])
    _, numbers = np.unique(pairs, axis=1, return_inverse=True)
    return torch.from_numpy(numbers.reshape(-1)).to(sample_ids.device)
