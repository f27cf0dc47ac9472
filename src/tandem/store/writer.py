"""The one writer of a store: a thread that commits in groups whatever was put since the last time.

What is written, and what follows from it, is decided by whoever puts it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tandem.errors import StoreError
from tandem.store.contract import TrajectoryStore
from tandem.store.records import Change, Event

FLUSH_TIMEOUT_S = 120.0
GATHER_S = 0.02
ENOUGH = 256
"""A group is written when it has that many changes, when somebody waits for it, or after that time:
a commit costs more than an episode, and every one lets other threads in."""


class StoreWriter:
    """Owned by the run's main process. ``put`` never blocks; order is kept.

    ``on_written`` is called from the writing thread with every group that is now kept, ``on_error``
    once when writing failed; from then on every call raises that error. With ``later`` there is no
    thread: a group is written when that calls what it is given, as a simulation wants it.
    """

    def __init__(
        self,
        store: TrajectoryStore,
        incarnation: str,
        *,
        later: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        self.store = store
        self.incarnation = incarnation
        self.on_written: Callable[[Sequence[Change]], None] | None = None
        self.on_error: Callable[[BaseException], None] | None = None
        self._last_key = store.last_key()
        self._pending: list[Change] = []
        self._num_put = 0
        self._num_written = 0
        self._is_closing = False
        self._is_awaited = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._later = later
        self._thread: threading.Thread | None = None
        if later is None:
            self._thread = threading.Thread(target=self._run, name="tandem-store", daemon=True)
            self._thread.start()

    def next_key(self) -> int:
        """A key for the next attempt; to be put in this order."""
        self._last_key += 1
        return self._last_key

    def put(self, *changes: Change) -> None:
        """Queue changes for the next group."""
        with self._changed:
            self._raise_if_broken()
            is_first = not self._pending
            self._pending.extend(changes)
            self._num_put += len(changes)
            if self._later is not None:
                if is_first:
                    self._later(self._write_group)
            elif is_first or len(self._pending) >= ENOUGH > len(self._pending) - len(changes):
                self._changed.notify_all()

    def log(self, kind: str, version: int, detail: Mapping[str, Any]) -> None:
        """Queue an entry of the schedule."""
        self.put(Event(kind, version, self.incarnation, detail, at=time.time()))

    def hurry(self) -> None:
        """Somebody waits for what was put so far: write it without gathering more."""
        with self._changed:
            if self._pending and not self._is_awaited:
                self._is_awaited = True
                self._changed.notify_all()

    def flush(self) -> None:
        """Return when everything put so far is written.

        Raises:
            StoreError: writing failed, or took longer than ``FLUSH_TIMEOUT_S``.
        """
        if self._later is not None:
            self._write_group()
        with self._changed:
            self.hurry()
            goal = self._num_put  # what others put from here on is not waited for
            is_done = self._changed.wait_for(
                lambda: self._error is not None or self._num_written >= goal, FLUSH_TIMEOUT_S
            )
            self._raise_if_broken()
            if not is_done:
                raise StoreError(
                    f"the store has not written {goal - self._num_written} changes within "
                    f"{FLUSH_TIMEOUT_S:g} s; is the disk alive?"
                )

    def sync(self) -> None:
        """``flush``, and what is written survives a power failure."""
        self.flush()
        self.store.sync()

    def close(self) -> None:
        """Write what is left and end the thread; the store stays open. Idempotent."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is None:
            self._write_group()
        else:
            self._thread.join(FLUSH_TIMEOUT_S)

    def _is_due(self) -> bool:
        return self._is_closing or self._is_awaited or len(self._pending) >= ENOUGH

    def _raise_if_broken(self) -> None:
        if self._error is not None:
            raise self._error
        if self._is_closing:
            raise StoreError("the store's writer was closed")

    def _run(self) -> None:
        while self._error is None:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._is_closing)
                if not self._pending:
                    return
                self._changed.wait_for(self._is_due, GATHER_S)
            self._write_group()

    def _write_group(self) -> None:
        """Write what is pending, as one group."""
        with self._changed:
            group, self._pending = self._pending, []
            self._is_awaited = False
        if not group or self._error is not None:
            return
        try:
            self.store.write(group)
            if self.on_written is not None:
                self.on_written(group)
        except Exception as error:
            self._fail(error)
            return
        with self._changed:
            self._num_written += len(group)
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()
        if self.on_error is not None:
            self.on_error(error)
