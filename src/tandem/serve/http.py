"""HTTP/1.1 with a deadline for headers: who sends half a request does not hold a connection."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_TIMEOUT_S = 10.0


class DeadlineProtocol(H11Protocol):
    """Closes a connection whose headers are not complete ``HEADER_TIMEOUT_S`` after it began."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._arm()

    def data_received(self, data: bytes) -> None:
        if not self._is_busy:
            self._arm()
        super().data_received(data)
        if self._is_busy:
            self._disarm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    @property
    def _is_busy(self) -> bool:
        """Whether a request's headers have been read and it is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def _arm(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_TIMEOUT_S, self._expire)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        self._deadline = None
        if not self._is_busy and not self.transport.is_closing():
            self.transport.close()
