"""JSON messages over a pipe: four bytes of length, then UTF-8. For our own child processes only."""

from __future__ import annotations

import json
import os
import select
import time
from typing import Any

from tandem.errors import DataError, EngineError

MAX_FRAME_BYTES = 64 << 20


def encode_frame(message: Any) -> bytes:
    """``DataError`` when ``message`` is no JSON or too long."""
    try:
        body = json.dumps(message).encode()
    except (TypeError, ValueError) as error:
        raise DataError(f"not JSON, so no child process can have it: {error}") from error
    if len(body) > MAX_FRAME_BYTES:
        raise DataError(f"a message of {len(body)} bytes, allowed: {MAX_FRAME_BYTES}")
    return len(body).to_bytes(4, "big") + body


def write_frame(descriptor: int, frame: bytes) -> None:
    """Write all of ``frame``; ``EngineError`` when the other end is gone."""
    view = memoryview(frame)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError as error:
        raise EngineError(f"the other process is gone: {error}") from error


def read_frame(descriptor: int, deadline: float | None = None) -> Any:
    """The next message; None at the end of the stream.

    Raises:
        TimeoutError: ``deadline`` (``time.monotonic``) passed.
    """
    head = _read(descriptor, 4, deadline)
    if head is None:
        return None
    size = int.from_bytes(head, "big")
    if size > MAX_FRAME_BYTES:
        raise EngineError(f"a message of {size} bytes, allowed: {MAX_FRAME_BYTES}")
    body = _read(descriptor, size, deadline)
    return None if body is None else json.loads(body)


def _read(descriptor: int, size: int, deadline: float | None) -> bytes | None:
    chunks: list[bytes] = []
    while size > 0:
        if deadline is not None:
            remaining = max(0.0, deadline - time.monotonic())
            if not select.select([descriptor], [], [], remaining)[0]:
                raise TimeoutError
        chunk = os.read(descriptor, min(size, 1 << 20))
        if not chunk:
            return None
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)
