"""The parent's end of the pipes to a child engine: starting it, talking to it, noticing its death.

What is asked of the child is decided in ``process.py``.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import tandem
from tandem.errors import DataError, EngineError
from tandem.inference.embedded.core import Finished
from tandem.inference.embedded.frames import (
    Frame,
    decode_error,
    decode_response,
    encode_request,
    read_frame,
    write_frame,
)
from tandem.inference.embedded.pending import Pending
from tandem.types import LLMRequest

CLOSE_TIMEOUT_S = 5.0
STDERR_LINES = 40

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Call:
    """A question to the child; ``on_success`` runs before its future ends."""

    future: Future[Any]
    on_success: Callable[[Any], None] | None


class ChildLink:
    """One child and the three threads that serve its pipes: requests, answers, stderr.

    A request is dropped from ``pending`` with ``EngineError`` when the child ends.
    """

    def __init__(self, pending: Pending, threads: int) -> None:
        self._pending = pending
        self._changed = threading.Condition()
        self._outbox: deque[Frame] = deque()
        self._is_closing = False
        self._requests: dict[int, LLMRequest] = {}
        self._calls: dict[int, _Call] = {}
        self._call_ids = itertools.count()
        self._ready: Future[None] = Future()
        self._last_lines: deque[str] = deque(maxlen=STDERR_LINES)
        self._ended: str | None = None
        # A session of its own: Ctrl-C in the terminal reaches the parent only, which closes it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tandem.inference.embedded.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=child_environment(threads),
            start_new_session=True,
        )
        self._threads = [
            threading.Thread(target=target, name=f"tandem-child-{name}", daemon=True)
            for name, target in (
                ("stderr", self._read_stderr),
                ("answers", self._read_answers),
                ("requests", self._write_requests),
            )
        ]

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, first: Frame, timeout_s: float) -> None:
        """Hand over the configuration and wait until the child serves.

        Raises:
            ConfigError, CapabilityError, DataError: as the child refused.
            EngineError: it died or took too long.
        """
        for thread in self._threads:
            thread.start()
        self._post(first)
        try:
            self._ready.result(timeout_s)
        except FutureTimeoutError:
            self.kill(
                f"inference.start_timeout_s: the child engine was not ready within {timeout_s:g} s"
            )
            self.close()
            raise EngineError(self._describe_end()) from None
        except BaseException:
            self.close()
            raise

    def generate(self, ticket: int, request: LLMRequest) -> None:
        item = encode_request(request)
        try:
            json.dumps(item)
        except TypeError as error:
            raise DataError(
                f"request {request.rid}: {error}; allowed: plain integers as token ids and plain "
                "numbers and strings as options"
            ) from error
        self._requests[ticket] = request
        self._post({"type": "generate", "items": [(ticket, item)]})

    def abort(self, ticket: int) -> None:
        self._post({"type": "abort", "tickets": [ticket]})

    def call(
        self,
        what: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        on_success: Callable[[Any], None] | None = None,
    ) -> Future[Any]:
        """Ask for something at the next token border; the future cannot be cancelled."""
        call = _Call(Future(), on_success)
        call.future.set_running_or_notify_cancel()
        with self._changed:
            if self._ended is not None:
                raise EngineError(self._ended)
            number = next(self._call_ids)
            self._calls[number] = call
        self._post({"type": what, "call": number, **(arguments or {})})
        return call.future

    def kill(self, reason: str) -> None:
        """End the child at once; ``reason`` is what everyone waiting is told."""
        with self._changed:
            self._ended = self._ended or reason
        self._process.kill()

    def close(self) -> None:
        """Let the child end by closing its input, forcibly if need be, and wait for it."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        for stream in (self._process.stdout, self._process.stderr):
            cast("BinaryIO", stream).close()

    # --- the threads ---

    def _post(self, frame: Frame) -> None:
        with self._changed:
            last = self._outbox[-1] if self._outbox else {}
            if frame.get("type") == last.get("type") == "generate":
                last["items"].extend(frame["items"])
            else:
                self._outbox.append(frame)
            self._changed.notify()

    def _write_requests(self) -> None:
        stream = cast("BinaryIO", self._process.stdin)
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._outbox or self._is_closing)
                    frames, self._outbox = self._outbox, deque()
                    is_last = self._is_closing
                for frame in frames:
                    write_frame(stream, frame)
                if is_last:
                    break
        except BrokenPipeError:
            logger.debug("the child engine closed its input")
        finally:
            _close_quietly(stream)

    def _read_answers(self) -> None:
        stream = cast("BinaryIO", self._process.stdout)
        try:
            while (frame := read_frame(stream)) is not None:
                self._handle(frame)
        except Exception as error:  # everyone who waits must hear of it
            logger.exception("an answer of the child engine cannot be used")
            self.kill(f"an answer of the child engine cannot be used: {error!r}")
        self._process.wait()
        self._threads[0].join()
        with self._changed:
            self._ended = reason = self._describe_end()
            calls, self._calls = self._calls, {}
            # The writer must not wait for ever for requests that nobody will read.
            self._is_closing = True
            self._changed.notify()
        for call in calls.values():
            call.future.set_exception(EngineError(reason))
        if not self._ready.done():
            self._ready.set_exception(EngineError(reason))
        self._pending.end(reason)

    def _handle(self, frame: Frame) -> None:
        match frame["type"]:
            case "finished":
                self._pending.deliver([self._decode(*item) for item in frame["items"]])
            case "tokens":
                request = self._requests[frame["ticket"]]
                if request.on_tokens is not None:
                    request.on_tokens(*frame["new"])
            case "reply":
                self._end_call(frame)
            case "ready":
                self._ready.set_result(None)
            case "refused":
                self._ready.set_exception(decode_error(frame))

    def _decode(self, ticket: int, outcome: Frame) -> Finished:
        request = self._requests.pop(ticket)
        if "error" in outcome:
            return Finished(ticket, decode_error(outcome))
        return Finished(ticket, decode_response(outcome, request))

    def _end_call(self, frame: Frame) -> None:
        with self._changed:
            call = self._calls.pop(frame["call"])
        if "error" in frame:
            call.future.set_exception(decode_error(frame))
            return
        if call.on_success is not None:
            call.on_success(frame["value"])
        call.future.set_result(frame["value"])

    def _read_stderr(self) -> None:
        for line in cast("BinaryIO", self._process.stderr):
            text = line.decode(errors="replace").rstrip()
            self._last_lines.append(text)
            logger.info("child engine: %s", text)

    def _describe_end(self) -> str:
        reason = self._ended or f"the child engine ended with exit code {self._process.returncode}"
        if not self._last_lines or "\n" in reason:
            return reason
        return f"{reason}; its last lines:\n" + "\n".join(self._last_lines)


SPIN_COUNT = "20000"
"""How long a thread of the child looks for work before it sleeps: longer than between two layers
(sleeping there makes a step of two threads 1.7 times as long), far shorter than a time slice, so
that a process on the same core is not kept waiting."""


KEPT_MEMORY = ":".join(
    f"glibc.malloc.{name}" for name in ("arena_max=1", "mmap_max=0", "trim_threshold=1099511627776")
)
"""Freed memory stays with the child, for its next pass and its next set of weights: touching fresh
memory costs more than computing with it."""


def child_environment(threads: int) -> dict[str, str]:
    """This process's environment with the child's thread limits and this package importable."""
    source = str(Path(tandem.__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    return {
        "GLIBC_TUNABLES": KEPT_MEMORY,
        "GOMP_SPINCOUNT": SPIN_COUNT,
        **kept,
        "PYTHONPATH": source if not inherited else source + os.pathsep + inherited,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
    }


def _close_quietly(stream: BinaryIO) -> None:
    try:
        stream.close()
    except BrokenPipeError:
        logger.debug("the child engine was gone before its input was closed")
