"""The durable store: one SQLite file, ``rollouts.sqlite``, that any program can read.

``docs/rollouts.md`` describes the tables. A commit survives the death of the process (write-ahead
log), ``sync`` makes what was committed survive a power failure. Grouping changes into transactions
is ``writer``'s.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

from tandem.errors import StoreError
from tandem.observe.moments import reach
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

STORE_FILE = "rollouts.sqlite"
SCHEMA_VERSION = 1
_APPLICATION_ID = 0x54414E44  # "TAND"
_BUSY_TIMEOUT_S = 30.0
_TEXT = json.JSONEncoder(default=str)
"""Spans are a workflow's own words: whatever is in them, they do not end the run."""

_SCHEMA = f"""
PRAGMA page_size = 8192;
PRAGMA auto_vacuum = INCREMENTAL;
PRAGMA journal_mode = WAL;
BEGIN IMMEDIATE;
CREATE TABLE episodes (
  key INTEGER PRIMARY KEY AUTOINCREMENT,
  episode_id INTEGER NOT NULL,
  attempt INTEGER NOT NULL,
  state TEXT NOT NULL CHECK (state IN ({", ".join(f"'{s.value}'" for s in sorted(STORED_STATES))})),
  incarnation TEXT NOT NULL,
  started_version INTEGER NOT NULL,
  reason TEXT,
  oldest_version INTEGER,
  newest_version INTEGER,
  closed_version INTEGER,
  step INTEGER,
  reward REAL,
  num_rows INTEGER NOT NULL,
  num_tokens INTEGER NOT NULL,
  ended_at REAL NOT NULL,
  queued_s REAL NOT NULL,
  running_s REAL NOT NULL,
  size_bytes INTEGER NOT NULL
);
CREATE INDEX episodes_by_id ON episodes (episode_id);
CREATE TABLE contents (
  key INTEGER PRIMARY KEY REFERENCES episodes (key),
  prompt TEXT,
  completions TEXT NOT NULL,
  rewards TEXT NOT NULL,
  spans TEXT NOT NULL,
  rows BLOB
);
CREATE TABLE events (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  at REAL NOT NULL,
  incarnation TEXT NOT NULL,
  version INTEGER NOT NULL,
  kind TEXT NOT NULL,
  detail TEXT NOT NULL,
  superseded INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX events_by_kind ON events (kind, version);
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""

_COLUMNS = ", ".join(StoredEpisode._fields[:-1])  # all but the content
_INSERT = f"INSERT INTO episodes ({_COLUMNS}, size_bytes) VALUES "
_INSERT_CONTENT = "INSERT INTO contents VALUES "
_MAX_ROWS = 50
"""Of one statement, whose variables old SQLites bound at 999. Every statement lets another thread
in, which costs more than a row."""
_INSERT_EVENT = "INSERT INTO events (at, incarnation, version, kind, detail) VALUES "
_MOVES = {
    state: "UPDATE episodes SET state = ?, reason = ?, step = ?, closed_version = ? "
    "WHERE key IN (SELECT value FROM json_each(?)) "
    f"AND state IN ({', '.join(repr(source.value) for source in sorted(sources))})"
    for state, sources in SOURCES.items()
}


class SqliteStore(TrajectoryStore):
    """The store in one file; made if it is not there and ``read_only`` is off."""

    def __init__(self, path: Path | str, *, read_only: bool = False) -> None:
        self.path = Path(path)
        self._lock = threading.RLock()
        if read_only and not self.path.is_file():
            raise StoreError(f"{self.path}: there is no trajectory store; RL runs write one")
        self._db: sqlite3.Connection | None = None
        try:
            with self._guarded():
                self._db = self._connect(read_only)
                self._prepare(read_only)
        except StoreError:
            self.close()
            raise

    def _connect(self, read_only: bool) -> sqlite3.Connection:
        uri = f"{self.path.resolve().as_uri()}?mode={'ro' if read_only else 'rwc'}"
        return sqlite3.connect(
            uri, uri=True, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )

    def _prepare(self, read_only: bool) -> None:
        if not read_only:
            if self._one("SELECT count(*) FROM sqlite_master") == (0,):
                self._open.executescript(_SCHEMA)
            self._open.execute("PRAGMA synchronous = NORMAL")
        (application,) = self._one("PRAGMA application_id")
        (version,) = self._one("PRAGMA user_version")
        if (application, version) != (_APPLICATION_ID, SCHEMA_VERSION):
            raise StoreError(
                f"{self.path}: is not a trajectory store of schema version {SCHEMA_VERSION} "
                f"(application {application}, version {version}); read it with the Tandem that "
                "wrote it, or move it away"
            )

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Hold the lock; errors of SQLite and of the disk become ``StoreError``."""
        with self._lock:
            try:
                yield
            except sqlite3.Error as error:
                raise StoreError(
                    f"{self.path}: {type(error).__name__}: {error}. Free disk space if it is full; "
                    "if the file is damaged, move it away and resume: what it held runs again"
                ) from error

    @property
    def _open(self) -> sqlite3.Connection:
        if self._db is None:
            raise StoreError(f"{self.path}: the store was closed")
        return self._db

    def _one(self, statement: str, values: Sequence[Any] = ()) -> tuple[Any, ...]:
        row: tuple[Any, ...] = self._open.execute(statement, values).fetchone()
        return row

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._guarded():
            db = self._open
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            finally:
                if db.in_transaction:
                    db.execute("ROLLBACK")

    # --- writing ----------------------------------------------------------------------------------

    def write(self, changes: Sequence[Change]) -> None:
        with self._transaction() as db:
            # Apart, because events among the episodes would make many statements of one.
            _log(db, [change for change in changes if isinstance(change, Event)])
            others = [change for change in changes if not isinstance(change, Event)]
            for is_episode, group in groupby(others, lambda c: isinstance(c, StoredEpisode)):
                if is_episode:
                    _add(db, [episode for episode in group if isinstance(episode, StoredEpisode)])
                    continue
                for change in group:
                    if isinstance(change, Moved):
                        self._move(db, change)
            reach("store.commit")

    def _move(self, db: sqlite3.Connection, change: Moved) -> None:
        closed = change.version if change.state in FINAL_STATES else None
        keys = json.dumps(change.keys)
        values = (change.state.value, change.reason, change.step, closed, keys)
        if db.execute(_MOVES[change.state], values).rowcount == len(change.keys):
            return
        for key in change.keys:
            found = db.execute("SELECT state FROM episodes WHERE key = ?", (key,)).fetchone()
            if found is None or found[0] != change.state.value:
                state = "not stored" if found is None else found[0]
                raise StoreError(f"attempt {key} is {state}; it cannot become {change.state}")
        raise StoreError(f"attempts {change.keys}: some are {change.state} already")

    def sync(self) -> None:
        with self._guarded():
            db = self._open
            db.execute("PRAGMA synchronous = FULL")
            try:
                # A commit that changes something makes SQLite flush the whole log.
                db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            finally:
                db.execute("PRAGMA synchronous = NORMAL")

    def rewind(self, point: RewindPoint) -> Rewound:
        with self._transaction() as db:
            found = db.execute(
                f"SELECT {_COLUMNS} FROM episodes WHERE episode_id >= ? OR episode_id IN "
                "(SELECT value FROM json_each(?)) ORDER BY key",
                (point.first_new_id, json.dumps(sorted(point.open_ids))),
            )
            dispatches = self._events("kind = 'dispatch' AND version >= ?", (point.step,))
            changed, result = rewound(map(_episode, found), dispatches, point)
            db.executemany(
                "UPDATE episodes SET state = ?, reason = ?, step = ?, closed_version = ? "
                "WHERE key = ?",
                [(e.state.value, e.reason, e.step, e.closed_version, e.key) for e in changed],
            )
            reach("store.rewind")
            db.execute(
                "UPDATE events SET superseded = 1 WHERE (kind = 'batch' AND version >= ?) "
                "OR (kind = 'trained' AND version > ?)",
                (point.step, point.step),
            )
            return result

    def retain(self, *, needed_from: int, keep_from: int | None, max_bytes: int | None) -> int:
        with self._transaction() as db:
            sizes = db.execute(
                "SELECT closed_version, sum(size_bytes) FROM episodes "
                "WHERE closed_version IS NOT NULL GROUP BY closed_version"
            )
            cut = retention_cut(
                dict(sizes.fetchall()),
                self.size_bytes(),
                needed_from=needed_from,
                keep_from=keep_from,
                max_bytes=max_bytes,
            )
            if cut is None:
                return 0
            gone = "SELECT key FROM episodes WHERE closed_version <= ?"
            db.execute(f"DELETE FROM contents WHERE key IN ({gone})", (cut,))
            removed = db.execute("DELETE FROM episodes WHERE closed_version <= ?", (cut,)).rowcount
            reach("store.retention")
            db.execute("DELETE FROM events WHERE version < ? AND kind != 'start'", (cut,))
        with self._guarded():
            # A script is stepped to its end; one `execute` would free a single page.
            self._open.executescript("PRAGMA incremental_vacuum;")
        return removed

    # --- reading ----------------------------------------------------------------------------------

    def find(self, query: Query = EVERYTHING) -> list[StoredEpisode]:
        where, values = _conditions(query)
        order = "key DESC" if query.newest else "key"
        statement = f"SELECT {_COLUMNS} FROM episodes WHERE {where} ORDER BY {order} LIMIT ?"
        limit = -1 if query.limit is None else query.limit
        with self._guarded():
            found = [_episode(row) for row in self._open.execute(statement, (*values, limit))]
        return found[::-1] if query.newest else found

    def content(self, key: int) -> Content:
        with self._guarded():
            row = self._one(
                "SELECT prompt, completions, rewards, spans, rows FROM contents WHERE key = ?",
                (key,),
            )
        if row is None:
            raise StoreError(f"attempt {key}: not stored")
        prompt, completions, rewards, spans, rows = row
        return Content(
            prompt=prompt,
            completions=tuple(json.loads(completions)),
            rewards=tuple(json.loads(rewards)),
            spans=tuple(json.loads(spans)),
            rows=rows,
        )

    def events(self, *kinds: str, superseded: bool = False) -> list[Event]:
        where = f"kind IN ({', '.join('?' * len(kinds))})" if kinds else "1"
        if not superseded:
            where += " AND superseded = 0"
        with self._guarded():
            return self._events(where, kinds)

    def _events(self, where: str, values: Sequence[Any]) -> list[Event]:
        found = self._open.execute(
            "SELECT kind, version, incarnation, detail, at, seq, superseded FROM events "
            f"WHERE {where} ORDER BY seq",
            values,
        )
        return [
            Event(kind, version, incarnation, json.loads(detail), at, seq, bool(superseded))
            for kind, version, incarnation, detail, at, seq, superseded in found
        ]

    def counts(self) -> dict[EpisodeState, int]:
        with self._guarded():
            found = self._open.execute("SELECT state, count(*) FROM episodes GROUP BY state")
            return {EpisodeState(state): number for state, number in found}

    def last_key(self) -> int:
        with self._guarded():
            row = self._one("SELECT max(seq) FROM sqlite_sequence WHERE name = 'episodes'")
        return int(row[0] or 0)

    def size_bytes(self) -> int:
        with self._guarded():
            return int(self._one("SELECT total(size_bytes) FROM episodes")[0])

    def close(self) -> None:
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None


def _add(db: sqlite3.Connection, episodes: Sequence[StoredEpisode]) -> None:
    for start in range(0, len(episodes), _MAX_ROWS):
        heads: list[Any] = []
        contents: list[Any] = []
        chunk = episodes[start : start + _MAX_ROWS]
        for episode in chunk:
            content = episode.content or Content()
            heads += (*episode[:3], episode.state.value, *episode[4:-1], content.size_bytes)
            lists = (content.completions, content.rewards, content.spans)
            texts = [_TEXT.encode(items) if items else "[]" for items in lists]
            contents += (episode.key, content.prompt, *texts, content.rows)
        db.execute(_INSERT + _places(len(chunk), 18), heads)
        db.execute(_INSERT_CONTENT + _places(len(chunk), 6), contents)


def _log(db: sqlite3.Connection, events: Sequence[Event]) -> None:
    for start in range(0, len(events), _MAX_ROWS):
        chunk = events[start : start + _MAX_ROWS]
        values: list[Any] = []
        for event in chunk:
            detail = json.dumps(event.detail)
            values += (event.at, event.incarnation, event.version, event.kind, detail)
        db.execute(_INSERT_EVENT + _places(len(chunk), 5), values)


@lru_cache(maxsize=3 * _MAX_ROWS)
def _places(rows: int, columns: int) -> str:
    return ", ".join([f"({', '.join('?' * columns)})"] * rows)


def _episode(row: Iterable[Any]) -> StoredEpisode:
    key, episode_id, attempt, state, *rest = row
    return StoredEpisode(key, episode_id, attempt, EpisodeState(state), *rest)


def _conditions(query: Query) -> tuple[str, list[Any]]:
    parts = ["1"]
    values: list[Any] = []
    if query.states is not None:
        parts.append(f"state IN ({', '.join('?' * len(query.states))})")
        values += [state.value for state in query.states]
    for condition, value in (
        ("episode_id = ?", query.episode_id),
        ("attempt = ?", query.attempt),
        ("step = ?", query.step),
        ("reward >= ?", query.min_reward),
        ("reward <= ?", query.max_reward),
    ):
        if value is not None:
            parts.append(condition)
            values.append(value)
    return " AND ".join(parts), values
