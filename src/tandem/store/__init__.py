"""The trajectory store: what is kept of every attempt at an episode, and the schedule of a run.

The contract, the SQLite file, its twin in memory, and the one writer. Which state an episode is in
is decided by the staleness rule in ``rollout/``; tensors are made of rows there too.
"""

from tandem.store.contract import Query, RewindPoint, Rewound, TrajectoryStore
from tandem.store.memory import MemoryStore
from tandem.store.records import Content, EpisodeRecord, Event, Moved, StoredEpisode
from tandem.store.sqlite import STORE_FILE, SqliteStore
from tandem.store.writer import StoreWriter

__all__ = [
    "STORE_FILE",
    "Content",
    "EpisodeRecord",
    "Event",
    "MemoryStore",
    "Moved",
    "Query",
    "RewindPoint",
    "Rewound",
    "SqliteStore",
    "StoreWriter",
    "StoredEpisode",
    "TrajectoryStore",
]
