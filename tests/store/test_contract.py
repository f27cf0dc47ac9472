"""What every trajectory store does: one suite over the durable one and its twin in memory."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.errors import StoreError
from tandem.store import (
    Content,
    Event,
    MemoryStore,
    Moved,
    Query,
    RewindPoint,
    SqliteStore,
    TrajectoryStore,
)
from tests.store.episodes import S, stored

ALL = 1 << 60
"""Above every episode id: all rows may be reused."""


@pytest.fixture(params=["sqlite", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TrajectoryStore]:
    made = SqliteStore(tmp_path / "s.sqlite") if request.param == "sqlite" else MemoryStore()
    yield made
    made.close()


def states(store: TrajectoryStore) -> dict[int, str]:
    return {episode.key: episode.state.value for episode in store.find()}


def test_what_was_written_is_read_back(store: TrajectoryStore) -> None:
    episode = stored(
        1,
        episode_id=(3 << 40) + 7,
        attempt=2,
        reason="why",
        started_version=4,
        oldest_version=4,
        newest_version=5,
        reward=0.1,
        ended_at=1e9,
        queued_s=0.25,
        running_s=1.5,
        content=Content("é\n", ("a", ""), (0.1, None), ({"name": "tool", "s": 1.0},), b"\0\xff"),
    )
    empty = stored(2, state=S.FAILED, content=None, reward=None, num_rows=0, oldest_version=None)
    store.write([episode, empty])
    assert store.find() == [episode._replace(content=None), empty]
    assert store.content(1) == episode.content
    assert store.content(2) == Content()
    assert store.counts() == {S.READY: 1, S.FAILED: 1}
    assert store.last_key() == 2


def test_the_life_of_an_attempt(store: TrajectoryStore) -> None:
    store.write([stored(1), stored(2)])
    store.write([Moved((2, 1), S.IN_TRAINING, version=6, step=7)])
    taken = store.find()
    assert [(e.state, e.step, e.closed_version) for e in taken] == [(S.IN_TRAINING, 7, None)] * 2
    store.write([Moved((1, 2), S.CONSUMED, version=7, step=7)])
    assert [(e.state, e.step, e.closed_version) for e in store.find()] == [(S.CONSUMED, 7, 7)] * 2
    assert store.counts() == {S.CONSUMED: 2}


@pytest.mark.parametrize(
    "change",
    [
        stored(1, episode_id=9),
        stored(3, state=S.RUNNING),
        Moved((8,), S.STALE, version=0),
        Moved((1,), S.CONSUMED, version=1, step=1),
        Moved((1, 2), S.IN_TRAINING, version=1),
    ],
    ids=["key taken", "running", "unknown key", "ready to consumed", "one is final"],
)
def test_an_impossible_change_undoes_its_whole_group(
    store: TrajectoryStore, change: object
) -> None:
    store.write([stored(1), stored(2, state=S.REJECTED)])
    first = [Event("batch", 0, "start"), stored(4), Moved((1,), S.STALE, version=3)]
    if isinstance(change, Moved):
        first = first[:2]
    with pytest.raises(StoreError):
        store.write([*first, change])  # type: ignore[list-item]
    assert states(store) == {1: "ready", 2: "rejected"}
    assert store.events() == []
    store.write([stored(4)])
    assert store.content(4).rows == b"rows"


def test_an_unknown_key_has_no_content(store: TrajectoryStore) -> None:
    with pytest.raises(StoreError, match="77"):
        store.content(77)


QUERIES = {
    "all": (Query(), [1, 2, 3, 4, 5]),
    "states": (Query(states=frozenset({S.READY, S.REJECTED})), [1, 2, 4]),
    "no state": (Query(states=frozenset()), []),
    "id": (Query(episode_id=10), [1, 5]),
    "attempt": (Query(episode_id=10, attempt=1), [5]),
    "step": (Query(step=4), [5]),
    "reward": (Query(min_reward=0.5), [1, 5]),
    "rewards": (Query(min_reward=0.0, max_reward=0.5), [2, 5]),
    "first": (Query(limit=2), [1, 2]),
    "last": (Query(limit=2, newest=True), [4, 5]),
}


@pytest.mark.parametrize("name", QUERIES)
def test_queries(store: TrajectoryStore, name: str) -> None:
    store.write(
        [
            stored(1, 10, reward=1.0),
            stored(2, 11, reward=0.0),
            stored(3, 12, state=S.FAILED, reward=None),
            stored(4, 13, state=S.REJECTED, reward=None),
            stored(5, 10, attempt=1, state=S.CONSUMED, step=4, reward=0.5),
        ]
    )
    query, expected = QUERIES[name]
    assert [episode.key for episode in store.find(query)] == expected


def test_events_keep_their_order_and_detail(store: TrajectoryStore) -> None:
    store.write([Event("start", 0, "a", {"x": [1, "y", None, 0.1]}, at=5.0)])
    store.write([Event("dispatch", 0, "a", {"attempts": [[1, 0]]}), Event("batch", 0, "a")])
    assert [e.kind for e in store.events()] == ["start", "dispatch", "batch"]
    (start,) = store.events("start")
    assert (start.detail, start.at, start.incarnation) == ({"x": [1, "y", None, 0.1]}, 5.0, "a")
    assert [e.kind for e in store.events("batch", "start")] == ["start", "batch"]
    assert store.events("start")[0].seq < store.events("batch")[0].seq


# --- going back to a checkpoint -------------------------------------------------------------------


def test_a_rewind_to_step_five(store: TrajectoryStore) -> None:
    """Ids 1 to 3 were closed at the checkpoint, 4 to 8 open, 20 is the position of the data."""
    made_by_5 = {"started_version": 5, "newest_version": 5}
    newer = {"started_version": 5, "newest_version": 6}
    before = [
        stored(1, state=S.CONSUMED, step=5, closed_version=5),
        stored(2, state=S.REJECTED, closed_version=4),
        stored(3, state=S.STALE, closed_version=5),
        stored(4),
        stored(5, state=S.CONSUMED, step=6, closed_version=6),
        stored(6, state=S.STALE, closed_version=7, reason="too old"),
        stored(7, state=S.REJECTED, closed_version=5, reason="should_accept"),
        stored(8, state=S.CONSUMED, step=7, closed_version=7, **newer),
        stored(20, state=S.IN_TRAINING, step=8, **made_by_5),
        stored(21, state=S.FAILED, closed_version=6, num_rows=0, reason="ValueError"),
        stored(22, newest_version=None, oldest_version=None),
        stored(23, **newer),
    ]
    store.write(before)
    point = RewindPoint(5, frozenset({4, 5, 6, 7, 8}), first_new_id=20, reuse_below=ALL)
    result = store.rewind(point)
    assert states(store) == {
        1: "consumed",
        2: "rejected",
        3: "stale",
        4: "ready",
        5: "ready",
        6: "ready",
        7: "superseded",
        8: "superseded",
        20: "ready",
        21: "superseded",
        22: "ready",
        23: "superseded",
    }
    assert result.ready == {4: 4, 5: 5, 6: 6, 20: 20, 22: 22}
    after = {episode.key: episode for episode in store.find()}
    assert after[6].reason is None
    assert after[7].reason == "resumed from step 5; was rejected: should_accept"
    ready = [e for e in after.values() if e.state is S.READY]
    assert {(e.step, e.closed_version) for e in ready} == {(None, None)}
    gone = [e for e in after.values() if e.state is S.SUPERSEDED]
    assert {(e.step, e.closed_version) for e in gone} == {(None, 5)}
    assert store.content(5).rows == b"rows"


def test_a_second_rewind_to_the_same_step_changes_nothing(store: TrajectoryStore) -> None:
    store.write([stored(1), stored(2, state=S.REJECTED), stored(3, newest_version=9)])
    point = RewindPoint(5, frozenset(), first_new_id=0, reuse_below=ALL)
    first = store.rewind(point)
    once = store.find()
    assert store.rewind(point) == first
    assert store.find() == once


def test_of_two_attempts_only_the_last_is_ready_again(store: TrajectoryStore) -> None:
    store.write([stored(1, 7, state=S.STALE), stored(2, 7, attempt=1)])
    result = store.rewind(RewindPoint(3, frozenset({7}), first_new_id=9, reuse_below=ALL))
    assert states(store) == {1: "superseded", 2: "ready"}
    assert result.ready == {7: 2}


def test_without_reuse_everything_after_the_checkpoint_runs_again(store: TrajectoryStore) -> None:
    store.write([stored(1, state=S.CONSUMED, step=3), stored(2), stored(3, 40)])
    point = RewindPoint(3, frozenset({2}), first_new_id=30, reuse_below=40)
    assert store.rewind(replace(point, reuse_below=0)).ready == {}
    assert states(store) == {1: "consumed", 2: "superseded", 3: "superseded"}


def test_ids_that_nobody_can_run_again_are_never_reused(store: TrajectoryStore) -> None:
    store.write([stored(1, 39), stored(2, 40)])
    result = store.rewind(RewindPoint(0, frozenset(), first_new_id=30, reuse_below=40))
    assert result.ready == {39: 1}
    assert states(store) == {1: "ready", 2: "superseded"}


def test_attempt_numbers_go_on_after_those_that_only_began(store: TrajectoryStore) -> None:
    def dispatch(version: int, *attempts: list[int]) -> Event:
        return Event("dispatch", version, "a", {"attempts": attempts})

    store.write(
        [
            dispatch(1, [4, 0], [9, 0]),
            stored(1, 4, attempt=1, state=S.FAILED),
            dispatch(2, [5, 0]),
            dispatch(3, [5, 1], [31, 0], [3, 6]),
        ]
    )
    result = store.rewind(RewindPoint(2, frozenset({4, 5, 9}), first_new_id=30))
    # 9 began before the checkpoint, whose own list has its number; 3 was final there.
    assert result.attempts == {4: 2, 5: 2, 31: 1}


def test_batches_of_the_abandoned_future_leave_the_schedule(store: TrajectoryStore) -> None:
    for version in range(4):
        store.write([Event("batch", version, "a"), Event("trained", version + 1, "a")])
    store.rewind(RewindPoint(2, frozenset(), first_new_id=0))
    assert [(e.kind, e.version) for e in store.events()] == [
        ("batch", 0),
        ("trained", 1),
        ("batch", 1),
        ("trained", 2),
    ]
    assert len(store.events(superseded=True)) == 8


# --- retention ------------------------------------------------------------------------------------


def consumed(step: int, size: int = 100) -> object:
    content = Content(rows=bytes(size))
    return stored(step, state=S.CONSUMED, step=step, closed_version=step, content=content)


def test_retention_keeps_what_the_oldest_checkpoint_may_need(store: TrajectoryStore) -> None:
    store.write([consumed(step) for step in range(1, 9)])  # type: ignore[misc]
    store.write([stored(20), Event("start", 0, "a")])
    store.write([Event("batch", version, "a") for version in range(8)])
    assert store.retain(needed_from=3, keep_from=5, max_bytes=None) == 3
    assert [e.key for e in store.find()] == [4, 5, 6, 7, 8, 20]
    assert [e.version for e in store.events("batch")] == [3, 4, 5, 6, 7]
    assert len(store.events("start")) == 1
    assert store.last_key() == 20


def test_retention_by_steps_alone_or_not_at_all(store: TrajectoryStore) -> None:
    store.write([consumed(step) for step in range(1, 5)])  # type: ignore[misc]
    assert store.retain(needed_from=4, keep_from=None, max_bytes=None) == 0
    assert store.retain(needed_from=4, keep_from=-3, max_bytes=None) == 0
    assert store.retain(needed_from=4, keep_from=1, max_bytes=None) == 1


def test_retention_by_size_removes_the_oldest_down_to_the_limit(store: TrajectoryStore) -> None:
    store.write([consumed(step) for step in range(1, 9)])  # type: ignore[misc]
    assert store.size_bytes() == 800
    assert store.retain(needed_from=8, keep_from=None, max_bytes=500) == 3
    assert store.size_bytes() == 500
    assert store.retain(needed_from=5, keep_from=None, max_bytes=0) == 2
    assert [e.key for e in store.find()] == [6, 7, 8]


def test_a_removed_attempt_has_no_content(store: TrajectoryStore) -> None:
    store.write([consumed(1)])  # type: ignore[list-item]
    store.retain(needed_from=1, keep_from=1, max_bytes=None)
    with pytest.raises(StoreError):
        store.content(1)


def test_a_reader_sees_whole_groups_while_another_thread_writes(store: TrajectoryStore) -> None:
    def write() -> None:
        for key in range(1, 200, 2):
            store.write([stored(key), stored(key + 1)])

    thread = threading.Thread(target=write)
    thread.start()
    while thread.is_alive():
        assert Counter(e.state for e in store.find())[S.READY] % 2 == 0
    thread.join()
    assert store.counts() == {S.READY: 200}
