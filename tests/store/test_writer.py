"""The writing thread: order, groups, and what happens when writing fails."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from tandem.errors import StoreError
from tandem.store import MemoryStore, Moved, StoreWriter
from tandem.store.records import Change
from tests.store.episodes import S, stored


class SlowStore(MemoryStore):
    """Holds every write until ``gate`` is set, and remembers the sizes of the groups."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.groups: list[int] = []
        self.num_syncs = 0

    def write(self, changes: Sequence[Change]) -> None:
        self.entered.set()
        assert self.gate.wait(10)
        self.groups.append(len(changes))
        super().write(changes)

    def sync(self) -> None:
        self.num_syncs += 1


def test_what_is_put_while_a_group_is_written_becomes_the_next_group() -> None:
    store = SlowStore()
    writer = StoreWriter(store, "start")
    written: list[int] = []
    writer.on_written = lambda changes: written.append(len(changes))
    writer.put(stored(writer.next_key()))
    assert store.entered.wait(10)
    for _ in range(5):
        writer.put(stored(writer.next_key()))
    writer.put(Moved((6,), S.IN_TRAINING, version=0, step=1))
    assert store.counts() == {}
    store.gate.set()
    writer.sync()
    assert store.groups == written == [1, 6]
    assert store.counts() == {S.READY: 5, S.IN_TRAINING: 1}
    assert store.num_syncs == 1
    writer.close()


def test_who_hurries_does_not_wait_for_a_group_to_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.store.writer.GATHER_S", 1000.0)
    writer = StoreWriter(MemoryStore(), "start")
    written = threading.Event()
    writer.on_written = lambda changes: written.set()
    writer.hurry()  # for nothing, which must not hurry the next group
    writer.put(stored(writer.next_key()))
    assert not written.wait(0.05)
    writer.hurry()
    assert written.wait(10)
    writer.close()


def test_a_flush_does_not_wait_for_what_others_put_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tandem.store.writer.FLUSH_TIMEOUT_S", 2.0)
    store = MemoryStore()
    writer = StoreWriter(store, "start")
    is_over = threading.Event()

    def put_another(_: Sequence[Change]) -> None:
        if not is_over.is_set():
            writer.put(stored(writer.next_key()))

    writer.on_written = put_another
    for _ in range(3):
        writer.put(stored(writer.next_key()))
    writer.flush()
    assert store.counts()[S.READY] >= 3
    is_over.set()
    writer.close()


def test_keys_go_on_after_those_of_the_store() -> None:
    store = MemoryStore()
    store.write([stored(41)])
    writer = StoreWriter(store, "start")
    assert [writer.next_key(), writer.next_key()] == [42, 43]
    writer.close()


def test_events_carry_the_incarnation() -> None:
    store = MemoryStore()
    writer = StoreWriter(store, "start")
    writer.log("batch", 3, {"members": []})
    writer.flush()
    (event,) = store.events()
    assert (event.kind, event.version, event.incarnation) == ("batch", 3, "start")
    assert event.at > 0
    writer.close()


def test_a_failed_write_is_told_once_and_then_raised_everywhere() -> None:
    writer = StoreWriter(MemoryStore(), "start")
    errors: list[BaseException] = []
    told = threading.Event()
    writer.on_error = lambda error: (errors.append(error), told.set())  # type: ignore[func-returns-value]
    writer.put(Moved((1,), S.STALE, version=0))
    assert told.wait(10)
    for call in (writer.flush, writer.sync, lambda: writer.put(stored(2))):
        with pytest.raises(StoreError, match="attempt 1 is not stored"):
            call()
    assert len(errors) == 1
    writer.close()


def test_closing_writes_what_is_left_and_takes_no_more() -> None:
    store = SlowStore()
    writer = StoreWriter(store, "start")
    writer.put(stored(1))
    assert store.entered.wait(10)
    writer.put(stored(2))
    store.gate.set()
    writer.close()
    writer.close()
    assert store.counts() == {S.READY: 2}
    with pytest.raises(StoreError, match="closed"):
        writer.put(stored(3))
