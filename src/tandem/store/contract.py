"""The TrajectoryStore contract and the decisions that every implementation shares. No I/O."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tandem.store.records import Change, Content, Event, StoredEpisode
from tandem.types import EpisodeState

_S = EpisodeState
_REUSABLE = frozenset({_S.READY, _S.IN_TRAINING, _S.CONSUMED, _S.STALE})


@dataclass(frozen=True, slots=True)
class Query:
    """Which attempts to list; None: any. ``newest`` keeps the last ``limit`` instead of the
    first."""

    states: frozenset[EpisodeState] | None = None
    episode_id: int | None = None
    attempt: int | None = None
    step: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    limit: int | None = None
    newest: bool = False

    def matches(self, episode: StoredEpisode) -> bool:
        wanted = (
            (self.episode_id, episode.episode_id),
            (self.attempt, episode.attempt),
            (self.step, episode.step),
        )
        if any(value is not None and value != received for value, received in wanted):
            return False
        if self.states is not None and episode.state not in self.states:
            return False
        if self.min_reward is None and self.max_reward is None:
            return True
        reward = episode.reward
        return (
            reward is not None
            and (self.min_reward is None or reward >= self.min_reward)
            and (self.max_reward is None or reward <= self.max_reward)
        )


EVERYTHING = Query()


@dataclass(frozen=True, slots=True)
class RewindPoint:
    """What a checkpoint says: its step, the episodes open then, the first id after its position.

    Rows that are still usable are kept of episodes below ``reuse_below``; all others run again.
    """

    step: int
    open_ids: frozenset[int]
    first_new_id: int
    reuse_below: int = 0

    def covers(self, episode_id: int) -> bool:
        """Whether the episode was not final at the checkpoint."""
        return episode_id in self.open_ids or episode_id >= self.first_new_id


@dataclass(frozen=True, slots=True)
class Rewound:
    """``ready``: episode id to the key of its usable attempt. ``attempts``: next free attempt."""

    ready: Mapping[int, int] = field(default_factory=dict)
    attempts: Mapping[int, int] = field(default_factory=dict)


class TrajectoryStore(ABC):
    """Ended attempts of one run, each in exactly one state, and the schedule that led to them.

    Thread-safe. One process writes (the run's main one, through ``StoreWriter``), any may read.

    Raises:
        StoreError: from every method, when the store cannot be written, read or trusted.
    """

    @abstractmethod
    def write(self, changes: Sequence[Change]) -> None:
        """All of ``changes`` in order, or none; kept whatever happens to the process afterwards.

        Raises:
            StoreError: a key is unknown, taken, or in a state that does not lead to the new one.
        """

    @abstractmethod
    def sync(self) -> None:
        """What was written survives a power failure too when this returns."""

    @abstractmethod
    def rewind(self, point: RewindPoint) -> Rewound:
        """Go back to a checkpoint: what came after it is ready again or superseded."""

    @abstractmethod
    def retain(self, *, needed_from: int, keep_from: int | None, max_bytes: int | None) -> int:
        """Remove final attempts and the schedule before them; returns the number of attempts.

        What the checkpoint of step ``needed_from`` may need stays in any case. Of the rest goes
        what was closed by version ``keep_from`` (None: nothing), then the oldest until the contents
        take at most ``max_bytes`` (None: any size).
        """

    @abstractmethod
    def find(self, query: Query = EVERYTHING) -> list[StoredEpisode]:
        """Attempts in the order in which they ended, without their contents."""

    @abstractmethod
    def content(self, key: int) -> Content:
        """The contents of one attempt."""

    @abstractmethod
    def events(self, *kinds: str, superseded: bool = False) -> list[Event]:
        """The schedule in order; ``superseded`` adds what a resume went back on."""

    @abstractmethod
    def counts(self) -> dict[EpisodeState, int]:
        """How many attempts are in each state; states without any are absent."""

    @abstractmethod
    def last_key(self) -> int:
        """The highest key ever given; 0 in a new store."""

    @abstractmethod
    def size_bytes(self) -> int:
        """Size of all contents."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Idempotent."""


# --- decisions that implementations share ---------------------------------------------------------


def rewound(
    episodes: Iterable[StoredEpisode], dispatches: Iterable[Event], point: RewindPoint
) -> tuple[list[StoredEpisode], Rewound]:
    """The attempts that a rewind changes, as they are afterwards, and what it found.

    Of every episode that was not final at the checkpoint, the last attempt is ready again if it has
    rows and none of its tokens is newer than the checkpoint; all others are superseded.
    """
    last: dict[int, StoredEpisode] = {}
    affected = []
    for episode in episodes:
        is_kept = episode.state is _S.CONSUMED and (episode.step or 0) <= point.step
        if point.covers(episode.episode_id) and not is_kept:
            affected.append(episode)
            if episode.state in _REUSABLE:
                last[episode.episode_id] = episode
    usable = {e.episode_id: e.key for e in last.values() if _is_usable(e, point)}
    changed = []
    for episode in affected:
        after = _after(episode, point, is_usable=usable.get(episode.episode_id) == episode.key)
        if after != episode:
            changed.append(after)
    attempts: dict[int, int] = {}
    began = [(e.episode_id, e.attempt) for e in affected]
    began += [tuple(item) for event in dispatches for item in event.detail["attempts"]]
    for episode_id, attempt in began:
        if point.covers(episode_id):
            attempts[episode_id] = max(attempts.get(episode_id, 0), attempt + 1)
    return changed, Rewound(usable, attempts)


def _is_usable(episode: StoredEpisode, point: RewindPoint) -> bool:
    newest = episode.newest_version
    is_old_enough = newest is None or newest <= point.step
    return episode.num_rows > 0 and is_old_enough and episode.episode_id < point.reuse_below


def _after(episode: StoredEpisode, point: RewindPoint, *, is_usable: bool) -> StoredEpisode:
    if is_usable:
        return episode._replace(state=_S.READY, reason=None, closed_version=None, step=None)
    if episode.state is _S.SUPERSEDED:
        return episode
    was = episode.state.value + (f": {episode.reason}" if episode.reason else "")
    return episode._replace(
        state=_S.SUPERSEDED,
        reason=f"resumed from step {point.step}; was {was}",
        closed_version=point.step,
        step=None,
    )


def retention_cut(
    sizes: Mapping[int, int],
    total: int,
    *,
    needed_from: int,
    keep_from: int | None,
    max_bytes: int | None,
) -> int | None:
    """The version up to which closed attempts are removed; None: none are.

    ``sizes`` has the bytes of the final attempts by the version that closed them.
    """
    cut = None if keep_from is None else min(keep_from, needed_from)
    if max_bytes is None:
        return cut
    left = total
    for version in sorted(v for v in sizes if v <= needed_from):
        is_cut = cut is not None and version <= cut
        if not is_cut and left <= max_bytes:
            break
        left -= sizes[version]
        cut = version if cut is None else max(cut, version)
    return cut
