"""The child process of a ``ChildBackend``: ``python -m tandem.inference.embedded.child``.

Reads frames from its standard input and answers on its standard output, both taken out of reach of
stray prints first. It ends when its input ends, so it never outlives its parent.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, BinaryIO

import torch

from tandem.config.schema import InferenceConfig
from tandem.errors import TandemError
from tandem.inference.embedded.build import build_core
from tandem.inference.embedded.core import EmbeddedCore, Finished
from tandem.inference.embedded.filler import WeightFiller
from tandem.inference.embedded.frames import (
    Frame,
    decode_request,
    encode_error,
    encode_response,
    read_frame,
    write_frame,
)
from tandem.inference.embedded.loop import CoreLoop
from tandem.weights import Published


class Child:
    """Answers the parent's frames; those of different requests and calls come in any order."""

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self._source = source
        self._sink = sink
        self._writing = threading.Lock()

    def serve(self) -> int:
        """Load the model, answer until the input ends, return the exit code.

        Steps run in the thread that loaded the model: OpenMP keeps threads for each of its callers,
        and once they are more than the cores it lets them sleep between any two operations.
        """
        first = read_frame(self._source)
        if first is None:
            return 0
        try:
            config = InferenceConfig.model_validate(first["config"])
            torch.set_num_threads(config.threads)
            core = build_core(
                config,
                first["model_path"],
                first["incarnation"],
                tokenizer_path=first.get("tokenizer_path"),
            )
        except TandemError as error:
            self._send({"type": "refused", **encode_error(error)})
            return error.exit_code
        self._loop = CoreLoop(core, deliver=self._deliver, die=self._die)
        self._filler = WeightFiller(core, self._loop)
        threading.Thread(target=self._read, name="tandem-frames", daemon=True).start()
        self._send({"type": "ready"})
        self._loop.run()
        return 0

    def _read(self) -> None:
        try:
            while (frame := read_frame(self._source)) is not None:
                self._handle(frame)
        except Exception as error:
            self._die(error)
        self._loop.close()

    def _handle(self, frame: Frame) -> None:
        match frame["type"]:
            case "generate":
                self._loop.submit(
                    [
                        (ticket, decode_request(item, partial(self._stream, ticket)))
                        for ticket, item in frame["items"]
                    ]
                )
            case "abort":
                self._loop.abort(frame["tickets"])
            case "pause":
                self._answer(frame, self._loop.call(EmbeddedCore.pause))
            case "resume":
                self._answer(frame, self._loop.call(EmbeddedCore.resume))
            case "commit":
                published = Published.from_json(frame["published"])
                self._answer(frame, self._filler.commit(published))
            case "stats":
                self._send({"type": "reply", "call": frame["call"], "value": self._loop.stats()})

    def _answer(self, frame: Frame, outcome: Future[None]) -> None:
        def reply(done: Future[None]) -> None:
            error = done.exception()
            answer: dict[str, Any] = {"value": None} if error is None else encode_error(error)
            self._send({"type": "reply", "call": frame["call"], **answer})

        outcome.add_done_callback(reply)

    def _stream(self, ticket: int, *new: Sequence[float]) -> None:
        """Ids, log-probabilities and versions of tokens just made; ``finished`` comes after."""
        self._send({"type": "tokens", "ticket": ticket, "new": new})

    def _deliver(self, done: Sequence[Finished]) -> None:
        items = [
            (
                item.ticket,
                encode_error(item.outcome)
                if isinstance(item.outcome, Exception)
                else encode_response(item.outcome),
            )
            for item in done
        ]
        self._send({"type": "finished", "items": items})

    def _die(self, error: Exception) -> None:
        """Leave with the traceback on stderr, which the parent quotes."""
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stderr.flush()
        os._exit(1)

    def _send(self, frame: Frame) -> None:
        with self._writing:
            write_frame(self._sink, frame)


def main() -> None:
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    try:
        code = Child(source, sink).serve()
    except BrokenPipeError:
        code = 0
    sys.stderr.flush()
    # Without waiting for the loop's thread: nobody is left to hear its answers.
    os._exit(code)


if __name__ == "__main__":
    main()
