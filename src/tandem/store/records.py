"""What is kept of one attempt at an episode, and what may change in it. No tensors, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tandem.types import EpisodeState

_S = EpisodeState
SOURCES: Mapping[EpisodeState, frozenset[EpisodeState]] = {
    _S.IN_TRAINING: frozenset({_S.READY}),
    _S.CONSUMED: frozenset({_S.IN_TRAINING}),
    _S.STALE: frozenset({_S.READY}),
    _S.FAILED: frozenset({_S.READY}),
    _S.REJECTED: frozenset({_S.READY, _S.IN_TRAINING}),
    _S.SUPERSEDED: frozenset({_S.READY, _S.IN_TRAINING}),
}
"""Where an attempt may come from when it moves; only a rewind leads back to ready."""

STORED_STATES = frozenset(EpisodeState) - {_S.QUEUED, _S.RUNNING}
"""Queued and running attempts live in memory only."""

FINAL_STATES = STORED_STATES - {_S.READY, _S.IN_TRAINING}


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """One attempt, when its run ended: ``ready``, ``rejected``, ``failed`` or ``superseded``.

    ``rewards`` has None where a sample was not scored. ``versions``: the oldest and newest version
    of each row's generated tokens, None for a row without any. Times are in seconds; an attempt
    that never started ran for 0.
    """

    episode_id: int
    attempt: int
    training: bool
    state: EpisodeState
    reason: str | None
    prompt: str | None
    completions: tuple[str, ...]
    rewards: tuple[float | None, ...]
    versions: tuple[tuple[int, int] | None, ...]
    queued_s: float
    running_s: float


class Content(NamedTuple):
    """The large part of an attempt: what a listing does not read.

    ``rows`` are the rows that are trained on, in the format of a safetensors file; None when the
    workflow returned none. ``spans`` are what happened inside: dicts with ``name``, ``start_s``
    (since the attempt began), ``s``, and whatever else the workflow says.
    """

    prompt: str | None = None
    completions: tuple[str, ...] = ()
    rewards: tuple[float | None, ...] = ()
    spans: tuple[Mapping[str, Any], ...] = ()
    rows: bytes | None = None

    @property
    def size_bytes(self) -> int:
        text = len(self.prompt or "") + sum(map(len, self.completions))
        return text + 16 * len(self.rewards) + 64 * len(self.spans) + len(self.rows or b"")


class StoredEpisode(NamedTuple):
    """One attempt whose run has ended. ``key`` is its own, in the order in which attempts ended.

    ``incarnation`` with a version names the weights. ``oldest_version`` and ``newest_version`` are
    those of all its generated tokens, None without any. ``closed_version`` served when the state
    became final; ``step`` is the version that training on it made (or is making). ``reward`` is the
    mean of the scored samples. ``ended_at`` is in seconds since 1970. ``content`` is None in a
    listing.
    """

    key: int
    episode_id: int
    attempt: int
    state: EpisodeState
    incarnation: str
    started_version: int
    reason: str | None = None
    oldest_version: int | None = None
    newest_version: int | None = None
    closed_version: int | None = None
    step: int | None = None
    reward: float | None = None
    num_rows: int = 0
    num_tokens: int = 0
    ended_at: float = 0.0
    queued_s: float = 0.0
    running_s: float = 0.0
    content: Content | None = None


@dataclass(frozen=True, slots=True)
class Moved:
    """Attempts that change their state together. ``version`` serves at that moment."""

    keys: tuple[int, ...]
    state: EpisodeState
    version: int
    reason: str | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of the schedule; ``seq`` is given by the store.

    Kinds: ``start`` (of an incarnation), ``dispatch`` (attempts that began), ``batch`` (handed
    over, in order), ``trained`` (what training computed). ``superseded``: of a future that a resume
    went back on.
    """

    kind: str
    version: int
    incarnation: str
    detail: Mapping[str, Any] = field(default_factory=dict)
    at: float = 0.0
    seq: int = 0
    superseded: bool = False


Change = StoredEpisode | Moved | Event
