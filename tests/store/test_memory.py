"""The in-memory store of episode records."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.errors import ConfigError
from tandem.store import EpisodeRecord, MemoryEpisodeStore
from tandem.types import EpisodeState


def record(episode_id: int, attempt: int = 0, **changes: Any) -> EpisodeRecord:
    settings: dict[str, Any] = {
        "training": True,
        "state": EpisodeState.READY,
        "reason": None,
        "prompt": "p",
        "completions": ("c",),
        "rewards": (1.0,),
        "versions": ((0, 0),),
        "queued_s": 0.0,
        "running_s": 0.0,
    }
    return EpisodeRecord(episode_id=episode_id, attempt=attempt, **(settings | changes))


def test_records_are_found_by_episode_attempt_and_use() -> None:
    store = MemoryEpisodeStore()
    store(record(1))
    store(record(1, 1, reason="second"))
    store(record(1, training=False, reason="evaluation"))
    assert store.get(1) == record(1)
    assert store.get(1, 1) == record(1, 1, reason="second")
    assert store.get(1, training=False) == record(1, training=False, reason="evaluation")
    assert store.get(2) is None


def test_records_are_listed_oldest_first_by_state_and_use() -> None:
    store = MemoryEpisodeStore()
    for item in (record(3), record(1, state=EpisodeState.FAILED), record(2, training=False)):
        store.put(item)
    assert [r.episode_id for r in store.records()] == [3, 1, 2]
    assert [r.episode_id for r in store.records(EpisodeState.FAILED)] == [1]
    assert [r.episode_id for r in store.records(training=False)] == [2]


def test_only_the_newest_are_kept() -> None:
    store = MemoryEpisodeStore(keep=2)
    for key in (1, 2, 1, 3):
        store.put(record(key))
    assert [r.episode_id for r in store.records()] == [1, 3]
    assert len(store) == 2
    with pytest.raises(ConfigError, match="keep"):
        MemoryEpisodeStore(keep=0)
