"""Made-up attempts for tests of stores."""

from __future__ import annotations

from typing import Any

from tandem.store import Content, StoredEpisode
from tandem.types import EpisodeState

S = EpisodeState


def stored(key: int, episode_id: int | None = None, **changes: Any) -> StoredEpisode:
    """A ready attempt of one row of two tokens made by version 0."""
    values: dict[str, Any] = {
        "attempt": 0,
        "state": S.READY,
        "incarnation": "start",
        "started_version": 0,
        "oldest_version": 0,
        "newest_version": 0,
        "reward": 1.0,
        "num_rows": 1,
        "num_tokens": 2,
        "content": Content("2 + 2 =", ("4",), (1.0,), ({"name": "generate", "s": 0.5},), b"rows"),
    }
    return StoredEpisode(key, key if episode_id is None else episode_id, **values | changes)
