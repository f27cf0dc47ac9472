"""What only the durable store promises: dying processes, damaged files, other readers."""

from __future__ import annotations

import os
import signal
import sqlite3
from pathlib import Path

import pytest

from tandem.errors import StoreError
from tandem.store import Content, Event, SqliteStore
from tests.store.episodes import S, stored


def test_committed_groups_survive_the_death_of_the_process(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    pid = os.fork()
    if pid == 0:
        store = SqliteStore(path)
        store.write([stored(1), stored(2)])
        store.write([Event("batch", 0, "a")])
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    store = SqliteStore(path)
    assert store.counts() == {S.READY: 2}
    assert len(store.events()) == 1
    store.close()


def test_a_key_is_never_given_twice_even_after_retention(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    store = SqliteStore(path)
    store.write([stored(5, state=S.REJECTED, closed_version=1)])
    store.retain(needed_from=1, keep_from=1, max_bytes=None)
    store.close()
    store = SqliteStore(path)
    assert store.find() == []
    assert store.last_key() == 5
    store.close()


def test_the_file_shrinks_when_rows_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    store = SqliteStore(path)
    big = Content(rows=bytes(1 << 20))
    for key in range(1, 9):
        store.write([stored(key, state=S.CONSUMED, step=key, closed_version=key, content=big)])
    store.retain(needed_from=8, keep_from=6, max_bytes=None)
    store.close()
    assert path.stat().st_size < 3 << 20


def test_sync_flushes_the_log_although_nothing_changed(tmp_path: Path) -> None:
    """A commit under synchronous=FULL is what makes SQLite flush; it shows as a longer log."""
    path = tmp_path / "s.sqlite"
    store = SqliteStore(path)
    store.write([stored(1)])
    log = path.with_name("s.sqlite-wal")
    before = log.stat().st_size
    store.sync()
    assert log.stat().st_size > before
    store.close()


def test_a_reader_needs_a_store_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    with pytest.raises(StoreError, match="no trajectory store"):
        SqliteStore(path, read_only=True)
    assert not path.exists()
    store = SqliteStore(path)
    store.write([stored(1)])
    reader = SqliteStore(path, read_only=True)
    assert reader.content(1).rows == b"rows"
    store.write([stored(2)])
    assert len(reader.find()) == 2
    with pytest.raises(StoreError, match="readonly"):
        reader.write([stored(3)])
    reader.close()
    store.close()


@pytest.mark.parametrize("kind", ["text", "other database", "newer"])
def test_a_file_that_is_no_store_is_refused_with_a_remedy(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "s.sqlite"
    if kind == "text":
        path.write_text("hello, I am not a database at all " * 100)
    else:
        if kind == "newer":
            SqliteStore(path).close()
        db = sqlite3.connect(path)
        db.execute("PRAGMA user_version = 99")
        db.execute("CREATE TABLE IF NOT EXISTS other (x)")
        db.commit()
        db.close()
    with pytest.raises(StoreError, match="move it away"):
        SqliteStore(path)


def test_a_damaged_page_is_a_store_error(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    store = SqliteStore(path)
    store.write([stored(key, content=Content("x" * 3000)) for key in range(1, 50)])
    store.close()
    with path.open("r+b") as file:
        file.seek(4096 * 3)
        file.write(b"\xff" * 4096 * 20)
    with pytest.raises(StoreError, match="damaged"):  # noqa: PT012
        store = SqliteStore(path)
        for episode in store.find():
            store.content(episode.key)
    store.close()


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.sqlite")
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.counts()
