"""The store that dies with its process: the contract over plain dictionaries, for tests and tools.

What a resume or a reader of another process needs is in ``sqlite``.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from tandem.errors import StoreError
from tandem.store.contract import (
    EVERYTHING,
    Query,
    RewindPoint,
    Rewound,
    TrajectoryStore,
    retention_cut,
    rewound,
)
from tandem.store.records import (
    FINAL_STATES,
    SOURCES,
    STORED_STATES,
    Change,
    Content,
    Event,
    Moved,
    StoredEpisode,
)
from tandem.types import EpisodeState


class MemoryStore(TrajectoryStore):
    """Everything in two dictionaries and a list."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._episodes: dict[int, StoredEpisode] = {}
        self._contents: dict[int, Content] = {}
        self._events: list[Event] = []
        self._last_key = 0
        self._last_seq = 0

    def write(self, changes: Sequence[Change]) -> None:
        with self._lock:
            before: dict[int, StoredEpisode | None] = {}
            num_events = len(self._events)
            try:
                for change in changes:
                    self._apply(change, before)
            except StoreError:
                del self._events[num_events:]
                for key, episode in before.items():
                    self._restore(key, episode)
                raise

    def _restore(self, key: int, episode: StoredEpisode | None) -> None:
        if episode is None:
            del self._episodes[key], self._contents[key]
        else:
            self._episodes[key] = episode

    def _apply(self, change: Change, before: dict[int, StoredEpisode | None]) -> None:
        if isinstance(change, Moved):
            for key in change.keys:
                before.setdefault(key, self._move(key, change))
        elif isinstance(change, Event):
            self._last_seq += 1
            self._events.append(replace(change, seq=self._last_seq))
        else:
            self._add(change)
            before.setdefault(change.key, None)

    def _add(self, episode: StoredEpisode) -> None:
        if episode.key in self._episodes or episode.state not in STORED_STATES:
            raise StoreError(
                f"attempt {episode.key}: its key is taken, or {episode.state} is not a stored state"
            )
        self._episodes[episode.key] = episode._replace(content=None)
        self._contents[episode.key] = episode.content or Content()
        self._last_key = max(self._last_key, episode.key)

    def _move(self, key: int, change: Moved) -> StoredEpisode:
        """Returns the attempt as it was."""
        episode = self._episodes.get(key)
        if episode is None or episode.state not in SOURCES[change.state]:
            state = "not stored" if episode is None else episode.state.value
            raise StoreError(f"attempt {key} is {state}; it cannot become {change.state}")
        is_final = change.state in FINAL_STATES
        self._episodes[key] = episode._replace(
            state=change.state,
            reason=change.reason,
            step=change.step,
            closed_version=change.version if is_final else None,
        )
        return episode

    def sync(self) -> None:
        """Nothing of this outlives the process."""

    def rewind(self, point: RewindPoint) -> Rewound:
        with self._lock:
            dispatches = [e for e in self.events("dispatch") if e.version >= point.step]
            changed, result = rewound(self.find(), dispatches, point)
            self._episodes.update({episode.key: episode for episode in changed})
            self._events = [
                replace(e, superseded=True) if _is_undone(e, point.step) else e
                for e in self._events
            ]
            return result

    def retain(self, *, needed_from: int, keep_from: int | None, max_bytes: int | None) -> int:
        with self._lock:
            sizes: Counter[int] = Counter()
            for episode in self._episodes.values():
                if episode.closed_version is not None:
                    sizes[episode.closed_version] += self._contents[episode.key].size_bytes
            cut = retention_cut(
                sizes,
                self.size_bytes(),
                needed_from=needed_from,
                keep_from=keep_from,
                max_bytes=max_bytes,
            )
            if cut is None:
                return 0
            gone = [
                key
                for key, e in self._episodes.items()
                if e.closed_version is not None and e.closed_version <= cut
            ]
            for key in gone:
                del self._episodes[key], self._contents[key]
            self._events = [e for e in self._events if e.version >= cut or e.kind == "start"]
            return len(gone)

    def find(self, query: Query = EVERYTHING) -> list[StoredEpisode]:
        with self._lock:
            ordered = sorted(self._episodes.values(), key=lambda episode: episode.key)
        found = [episode for episode in ordered if query.matches(episode)]
        if query.limit is None or query.limit >= len(found):
            return found
        return found[len(found) - query.limit :] if query.newest else found[: query.limit]

    def content(self, key: int) -> Content:
        with self._lock:
            if key not in self._contents:
                raise StoreError(f"attempt {key}: not stored")
            return self._contents[key]

    def events(self, *kinds: str, superseded: bool = False) -> list[Event]:
        with self._lock:
            return [
                event
                for event in self._events
                if (not kinds or event.kind in kinds) and (superseded or not event.superseded)
            ]

    def counts(self) -> dict[EpisodeState, int]:
        with self._lock:
            return dict(Counter(episode.state for episode in self._episodes.values()))

    def last_key(self) -> int:
        return self._last_key

    def size_bytes(self) -> int:
        with self._lock:
            return sum(content.size_bytes for content in self._contents.values())

    def close(self) -> None:
        """Nothing is held."""


def _is_undone(event: Event, step: int) -> bool:
    """A batch handed over at version n makes version n + 1."""
    last = {"batch": step - 1, "trained": step}.get(event.kind)
    return last is not None and event.version > last
