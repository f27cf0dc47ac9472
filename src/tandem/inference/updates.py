"""One weight update as its receiver sees it: wait, commit, time out. Not tied to any backend."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from tandem.errors import WeightSyncError
from tandem.types import WeightUpdateMeta
from tandem.weights import Published, cancel, expect


class PendingUpdate:
    """One update from ``expect`` to its end; ``future`` gets the result or ``WeightSyncError``.

    ``apply`` is called once with what was published and returns the future of the commit;
    ``on_stuck`` is called if that commit does not end in time, when nobody can say any more which
    weights serve.
    """

    def __init__(
        self,
        meta: WeightUpdateMeta,
        apply: Callable[[Published], Future[None]],
        *,
        timeout_s: float,
        on_stuck: Callable[[str], None],
    ) -> None:
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()
        self._meta = meta
        self._apply = apply
        self._timeout_s = timeout_s
        self._on_stuck = on_stuck
        self._lock = threading.Lock()
        self._stage = "waiting"
        self._committing: Future[None] | None = None
        self._timer = threading.Timer(timeout_s, self._expire)
        self._timer.daemon = True
        try:
            arrival = expect(meta)
        except WeightSyncError as error:
            self._end(error)
            return
        self._timer.start()
        arrival.add_done_callback(self._arrived)

    def fail(self, error: Exception) -> None:
        """End the update now, because its backend ended."""
        cancel(self._meta)
        self._end(error)

    def _arrived(self, arrival: Future[Published]) -> None:
        if arrival.cancelled() or not self._advance("waiting", "committing"):
            return
        failure = arrival.exception()
        if failure is not None:
            self._end(failure)
            return
        published = arrival.result()
        received = (published.manifest.version, published.manifest.incarnation)
        if received != (self._meta.version, self._meta.incarnation):
            self._end(WeightSyncError(f"published {received}, expected {self._meta}"))
            return
        try:
            self._committing = self._apply(published)
        except Exception as error:
            self._end(error)
            return
        self._committing.add_done_callback(self._committed)

    def _committed(self, committing: Future[None]) -> None:
        if not committing.cancelled():
            self._end(committing.exception())

    def _expire(self) -> None:
        waited = f"weight version {self._meta.version}: no {{}} within {self._timeout_s:g} s; "
        if self._advance("waiting", "ended"):
            cancel(self._meta)
            self._settle(
                WeightSyncError(
                    waited.format("published weights")
                    + "the old version serves on; raise inference.update_timeout_s or look at the "
                    "train engine's upload_weights"
                )
            )
        elif self._advance("committing", "ended"):
            message = waited.format("commit")
            if self._committing is not None and self._committing.cancel():
                self._settle(WeightSyncError(message + "the old version serves on"))
                return
            message += "the backend was taken out of service, start a new one"
            self._on_stuck(message)
            self._settle(WeightSyncError(message))

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            if self._stage == "ended":
                return
            self._stage = "ended"
        self._timer.cancel()
        self._settle(error)

    def _settle(self, error: BaseException | None) -> None:
        if error is None:
            self.future.set_result(None)
        elif isinstance(error, WeightSyncError):
            self.future.set_exception(error)
        else:
            wrapped = WeightSyncError(
                f"weight version {self._meta.version} was not committed: {error}; the old version "
                "serves on if the backend lives"
            )
            wrapped.__cause__ = error
            self.future.set_exception(wrapped)

    def _advance(self, from_stage: str, to_stage: str) -> bool:
        with self._lock:
            if self._stage != from_stage:
                return False
            self._stage = to_stage
            return True
