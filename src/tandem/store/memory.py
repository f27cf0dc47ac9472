"""The store of records that lives and dies with its process. Durable stores have own files."""

from __future__ import annotations

import threading
from collections import OrderedDict

from tandem.errors import ConfigError
from tandem.store.records import EpisodeRecord
from tandem.types import EpisodeState


class MemoryEpisodeStore:
    """The newest ``keep`` records, in order of arrival. Thread-safe; can be an ``on_episode``."""

    def __init__(self, keep: int | None = 4096) -> None:
        if keep is not None and keep < 1:
            raise ConfigError(f"keep: got {keep}, allowed: None (all) or an integer >= 1")
        self._keep = keep
        self._lock = threading.Lock()
        self._records: OrderedDict[tuple[bool, int, int], EpisodeRecord] = OrderedDict()

    def put(self, record: EpisodeRecord) -> None:
        """Add a record; one of the same attempt is replaced."""
        key = (record.training, record.episode_id, record.attempt)
        with self._lock:
            self._records.pop(key, None)
            self._records[key] = record
            while self._keep is not None and len(self._records) > self._keep:
                self._records.popitem(last=False)

    __call__ = put

    def get(
        self, episode_id: int, attempt: int = 0, *, training: bool = True
    ) -> EpisodeRecord | None:
        with self._lock:
            return self._records.get((training, episode_id, attempt))

    def records(
        self, state: EpisodeState | None = None, *, training: bool | None = None
    ) -> list[EpisodeRecord]:
        """All kept records, oldest first, of one state and of training or evaluation if given."""
        with self._lock:
            return [
                record
                for record in self._records.values()
                if (state is None or record.state is state)
                and (training is None or record.training is training)
            ]

    def __len__(self) -> int:
        with self._lock:
            return len(self._records)
