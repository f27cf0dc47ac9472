"""Rows of an episode: checked when a workflow returns them, joined when a batch is handed over.

Tensors only; states and clocks are the executor's, bytes are ``encoding``'s.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy import count_nonzero
from tensordict import TensorDict

from tandem.data.batch import concat_columns
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

OF_EPISODE = ("episode_ids", "attempt")
"""What follows from the episode; a workflow's own are ignored."""


class RowFacts(NamedTuple):
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


_Sizes = np.ndarray[Any, np.dtype[np.int64]]

NO_ROWS = RowFacts(0, 0, None, None, None, None, None, 0)


@dataclass(slots=True, eq=False)
class EpisodeRows:
    """Checked rows of one attempt, as the workflow's own tensors.

    Not a TensorDict, which costs as much as all checks. ``arrays`` are those of ``tensors`` that
    the checks looked into: a tensor as an array costs more than its bytes. Columns that the
    workflow left out and that are one value for the episode are made when somebody wants them:
    ``group_ids`` (one group), ``sample_ids`` (one trajectory a row), ``truncated`` (none is),
    ``temperature``.
    """

    tensors: dict[str, torch.Tensor]
    num_rows: int
    episode_id: int
    attempt: int
    temperature: float = 1.0
    arrays: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)

    def with_columns(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """All tensors, with those of ``names`` that the workflow left out."""
        left_out = [name for name in names if name not in self.tensors]
        if not left_out:
            return self.tensors
        return self.tensors | {name: self._column(name) for name in left_out}

    def _column(self, name: str) -> torch.Tensor:
        if name == "sample_ids":
            return torch.arange(self.num_rows)
        return torch.full((self.num_rows,), self.value_of(name), dtype=PER_ROW[name])

    def value_of(self, name: str) -> int | float | bool:
        """The one value of a column that was left out."""
        if name == "group_ids":
            return self.episode_id
        return self.temperature if name == "temperature" else False

    def batch(self) -> TensorDict:
        """The rows with all columns, as a filter sees them."""
        return _batch([self], self.with_columns(PER_ROW))


def check_rows(
    rows: Any, episode_id: int, attempt: int, *, temperature: float = 1.0
) -> tuple[EpisodeRows, RowFacts]:
    """What a workflow returned as rows of its episode, or ``DataError`` saying why not."""
    where = f"rows of episode {episode_id}"
    if not isinstance(rows, TensorDict):
        raise DataError(f"{where}: got {type(rows).__name__}, allowed: TensorDict or None")
    if len(rows.batch_size) != 1 or rows.batch_size[0] < 1:
        raise DataError(
            f"{where}: batch_size {list(rows.batch_size)}, allowed: [B], B >= 1; return None to "
            "reject an episode"
        )
    tensors = {name: value for name, value in rows.items() if name not in OF_EPISODE}
    num_rows = rows.batch_size[0]
    shape = _require(tensors, "input_ids", torch.int64, where).shape
    if len(shape) != 2 or shape[1] < 1:
        raise DataError(f"{where}: input_ids has shape {list(shape)}, allowed: [B, T], T >= 1")
    arrays = {}
    for key, dtype in REQUIRED_PER_TOKEN.items():
        value = _require(tensors, key, dtype, where)
        if value.shape != shape:
            raise DataError(f"{where}: {key} has shape {list(value.shape)}, allowed: {list(shape)}")
        arrays[key] = value.numpy(force=True)
    rewards = _require(tensors, "rewards", torch.float32, where)
    if rewards.shape != (num_rows,):
        raise DataError(f"{where}: rewards has shape {list(rewards.shape)}, allowed: [{num_rows}]")
    for key, dtype in PER_ROW.items():
        if key in tensors and _require(tensors, key, dtype, where).shape != (num_rows,):
            raise DataError(f"{where}: {key} has another shape than [{num_rows}]")
    arrays["rewards"] = rewards.numpy(force=True)
    facts = _facts(where, **arrays)
    return EpisodeRows(tensors, num_rows, episode_id, attempt, temperature, arrays), facts


def _require(tensors: Mapping[str, Any], key: str, dtype: torch.dtype, where: str) -> torch.Tensor:
    value = tensors.get(key)
    if not isinstance(value, torch.Tensor):
        raise DataError(f"{where}: {key} is missing; a workflow returns it as {dtype}")
    if value.dtype is not dtype:
        raise DataError(f"{where}: {key} is {value.dtype}, allowed: {dtype}")
    return value


def _facts(
    where: str,
    *,
    rewards: np.ndarray[Any, Any],
    attention_mask: np.ndarray[Any, Any],
    loss_mask: np.ndarray[Any, Any],
    logprobs: np.ndarray[Any, Any],
    versions: np.ndarray[Any, Any],
) -> RowFacts:
    """Check the values and take what is worth knowing.

    By the functions of numpy that cost least to call, since most arrays are small.
    """
    if count_nonzero(loss_mask > attention_mask):
        raise DataError(f"{where}: loss_mask covers padding")
    if count_nonzero(loss_mask[:, 0]):
        raise DataError(f"{where}: loss_mask covers token 0, which has no prediction")
    trained = versions[loss_mask]
    if count_nonzero(trained < 0):
        raise DataError(f"{where}: a trained token has no version; only sampled tokens are trained")
    if count_nonzero(np.isfinite(logprobs[loss_mask])) < len(trained):
        raise DataError(f"{where}: a trained token has a log-probability that is not finite")
    scored = [reward for reward in rewards.tolist() if reward == reward]
    if any(map(math.isinf, scored)):
        raise DataError(f"{where}: a reward is infinite, allowed: finite numbers, NaN for no score")
    # Of the versions that are not negative, which as unsigned numbers come first.
    oldest, newest = _least(versions.view(np.uint64)), _greatest(versions)
    made = (oldest, newest) if newest >= 0 else (None, None)
    of_trained: tuple[int | None, int | None] = (None, None)
    if len(trained):
        of_trained = made if oldest == newest else (_least(trained), _greatest(trained))
    lengths = np.add.reduce(loss_mask, axis=1, dtype=np.int64).tolist()
    return RowFacts(
        num_rows=len(rewards),
        num_trained=len(trained),
        reward=math.fsum(scored) / len(scored) if scored else None,
        oldest=made[0],
        newest=made[1],
        trained_oldest=of_trained[0],
        trained_newest=of_trained[1],
        squared_lengths=sum([length * length for length in lengths]),
    )


def _least(array: np.ndarray[Any, Any]) -> int:
    """At half the cost of ``min``."""
    return int(array.item(array.argmin()))


def _greatest(array: np.ndarray[Any, Any]) -> int:
    return int(array.item(array.argmax()))


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
    episodes: Sequence[EpisodeRows], *, version: int | None = None, max_staleness: int = 0
) -> tuple[TensorDict, Staleness]:
    """One batch of all rows; with ``version``, tokens older than ``max_staleness`` leave the mask.

    ``sample_ids`` are numbered anew, so that equal numbers of two episodes do not meet.
    """
    named = [name for name in PER_ROW if any(name in rows.tensors for rows in episodes)]
    columns = concat_columns([rows.with_columns(named) for rows in episodes])
    staleness = Staleness(0, 0.0, 0)
    if version is not None:
        staleness = _mask_old(columns, version, max_staleness)
    return _batch(episodes, columns), staleness


def _mask_old(columns: dict[str, torch.Tensor], version: int, max_staleness: int) -> Staleness:
    """Take what is too old out of ``loss_mask``; in numpy, whose calls cost less than torch's."""
    mask = columns["loss_mask"].numpy(force=True)
    versions = columns["versions"].numpy(force=True)
    trained = mask & (versions >= version - max_staleness)
    made = versions[trained]
    masked = int(count_nonzero(mask)) - len(made)
    if masked:
        columns["loss_mask"] = torch.from_numpy(trained).to(columns["loss_mask"].device)
    if len(made) == 0:
        return Staleness(0, 0.0, masked)
    lengths_B = np.add.reduce(mask, axis=1, dtype=np.int64)
    trained_B = np.add.reduce(trained, axis=1, dtype=np.int64)
    return Staleness(
        max=version - _least(made),
        mean=float(version - made.mean()),
        masked_tokens=masked,
        trained_tokens=len(made),
        trained_lengths=int(np.add.reduce(trained_B * lengths_B)),
    )


def _batch(episodes: Sequence[EpisodeRows], fields: Mapping[str, torch.Tensor]) -> TensorDict:
    """Joined columns, with those that no workflow gave and those of the episodes."""
    sizes = np.array([rows.num_rows for rows in episodes])
    num_rows = int(np.add.reduce(sizes))
    made: dict[str, Any] = {
        name: _repeated([rows.value_of(name) for rows in episodes], sizes, PER_ROW[name])
        for name in PER_ROW
        if name not in fields and name != "sample_ids"
    }
    made["sample_ids"] = (
        _numbered(fields["sample_ids"], sizes) if "sample_ids" in fields else torch.arange(num_rows)
    )
    made["episode_ids"] = _repeated([rows.episode_id for rows in episodes], sizes, torch.int64)
    made["attempt"] = _repeated([rows.attempt for rows in episodes], sizes, torch.int64)
    return TensorDict({**fields, **made}, batch_size=[num_rows])


def _repeated(values: Sequence[Any], sizes: _Sizes, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.array(values).repeat(sizes)).to(dtype)


def _numbered(sample_ids: torch.Tensor, sizes: _Sizes) -> torch.Tensor:
    """Numbers of (episode, sample): those of an episode in their order, episode after episode."""
    known, ranks = np.unique(sample_ids.numpy(force=True), return_inverse=True)
    pairs = np.arange(len(sizes)).repeat(sizes) * len(known) + ranks
    _, numbers = np.unique(pairs, return_inverse=True)
    return torch.from_numpy(numbers).to(sample_ids.device)
