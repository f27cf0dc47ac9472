"""Who waits for which request and which update; shared by the backends around a core."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from tandem.errors import EngineError
from tandem.inference.embedded.core import Finished
from tandem.inference.updates import PendingUpdate
from tandem.types import LLMRequest, LLMResponse


class Pending:
    """Futures by ticket. Once ended, everything open and everything new gets the same error."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tickets = itertools.count()
        self._requests: dict[int, Future[LLMResponse]] = {}
        self._updates: list[PendingUpdate] = []
        self._ended: str | None = None

    async def run(
        self,
        req: LLMRequest,
        send: Callable[[int, LLMRequest], None],
        abort: Callable[[int], None],
    ) -> LLMResponse:
        """Send a request under a new ticket and await its end, on whatever loop this runs."""
        future: Future[LLMResponse] = Future()
        with self._lock:
            self._refuse_if_ended()
            ticket = next(self._tickets)
            self._requests[ticket] = future
        try:
            send(ticket, req)
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            abort(ticket)
            raise
        finally:
            with self._lock:
                self._requests.pop(ticket, None)

    def deliver(self, done: Iterable[Finished]) -> None:
        with self._lock:
            found = [(self._requests.pop(item.ticket, None), item.outcome) for item in done]
        for future, outcome in found:
            if future is None or not future.set_running_or_notify_cancel():
                continue
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    def add_update(self, start: Callable[[], PendingUpdate]) -> PendingUpdate:
        with self._lock:
            self._refuse_if_ended()
            self._updates = [item for item in self._updates if not item.future.done()]
        update = start()
        with self._lock:
            self._updates.append(update)
            ended = self._ended
        if ended is not None:
            update.fail(EngineError(ended))
        return update

    def end(self, reason: str) -> None:
        """Fail everything open with ``EngineError(reason)``; the first reason stays."""
        with self._lock:
            if self._ended is None:
                self._ended = reason
            reason = self._ended
            requests, self._requests = self._requests, {}
            updates, self._updates = self._updates, []
        for future in requests.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineError(reason))
        for update in updates:
            update.fail(EngineError(reason))

    def refuse_if_ended(self) -> None:
        with self._lock:
            self._refuse_if_ended()

    def _refuse_if_ended(self) -> None:
        if self._ended is not None:
            raise EngineError(self._ended)
