"""An answer as server-sent events, while its tokens are made.

What of a text can be told before it is complete is decided here; what the events look like is in
``answers``. Nothing that was told is ever taken back: the pieces join to the text of the answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any

from tandem.inference.stopping import TextStream
from tandem.rollout.tool_calls import CALL_MARKS
from tandem.serve.answers import DONE, Answer, Head, event_of, finish_choice, piece_choice
from tandem.serve.strict import RequestError

log = logging.getLogger(__name__)

HEARTBEAT_S = 10.0
"""Between the comments that keep a waiting stream alive."""

_Heard = tuple[int, Sequence[int], Sequence[float]]
_BEGINNINGS = ("{", "[", "`")
"""How a text begins that may be a call as a whole."""


class GrowingText:
    """The text of one sample as far as it is certain.

    Held back are halves of characters, what may become a stop string, an end of turn, and with
    ``has_tools`` what may become a call, or white space beside one.
    """

    def __init__(
        self, tokenizer: Any, *, ends: Collection[int], stop: Sequence[str], has_tools: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer)
        self._ends = ends
        self._stop = tuple(stop)
        self._has_tools = has_tools
        self._spoken = ""
        self._held: list[int] = []
        self._told = ""

    def push(self, token: int) -> str:
        """Add a token and return the text that became certain."""
        self._held.append(token)
        if token in self._ends:
            return ""
        for item in self._held:
            self._stream.push(item)
            if self._has_tools:
                self._spoken += self._tokenizer.decode([item], skip_special_tokens=False)
        self._held.clear()
        text = self._stream.text
        piece = text[len(self._told) : self._certain(text)]
        self._told += piece
        return piece

    def finish(self, text: str) -> str:
        """What is left of ``text``, the whole."""
        if not text.startswith(self._told):
            log.warning("a stream differs from the answer that it became: %r", text[:200])
            return ""
        return text[len(self._told) :]

    def _certain(self, text: str) -> int:
        """How much of ``text`` will stay whatever comes."""
        found = [at for item in self._stop if (at := text.find(item)) >= 0]
        if self._has_tools:
            if any(mark in self._spoken for mark in CALL_MARKS) or text[:1].isspace():
                return 0
            if text.startswith(_BEGINNINGS):
                return 0
            text = text[: len(text) - _begun(text, CALL_MARKS)].rstrip()
        return min([len(text) - _begun(text, self._stop), *found])


def _begun(text: str, marks: Sequence[str]) -> int:
    """The length of the longest end of ``text`` that one of ``marks`` begins with."""
    longest = min(len(text), max(map(len, marks), default=0))
    for size in range(longest, 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0


class AnswerStream:
    """Made in the event loop that sends it; ``hear`` may be called from any thread."""

    def __init__(
        self,
        head: Head,
        tokenizer: Any,
        texts: Sequence[GrowingText],
        *,
        include_usage: bool,
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._texts = texts
        self._num_told = [0] * len(texts)
        self._untold: list[tuple[list[int], list[float]]] = [([], []) for _ in texts]
        self._has_begun = [False] * len(texts)
        self._include_usage = include_usage
        self._loop = asyncio.get_running_loop()
        self._heard: asyncio.Queue[_Heard | None] = asyncio.Queue()
        self.begun: asyncio.Future[None] = self._loop.create_future()

    def hear(
        self, index: int, ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]
    ) -> None:
        """New tokens of a sample. Those of a server that has ended go nowhere."""
        try:
            self._loop.call_soon_threadsafe(self._take, (index, ids, logprobs))
        except RuntimeError:
            log.debug("a token came after the end of the server")

    def _take(self, heard: _Heard) -> None:
        self._heard.put_nowait(heard)
        if not self.begun.done():
            self.begun.set_result(None)

    async def events(self, work: asyncio.Future[Answer]) -> AsyncIterator[str]:
        """Events as tokens come, then those of the answer's end, or of the error it ended with."""
        work.add_done_callback(lambda _: self._heard.put_nowait(None))
        while True:
            try:
                heard = await asyncio.wait_for(self._heard.get(), HEARTBEAT_S)
            except TimeoutError:
                yield ": waiting\n\n"
                continue
            if heard is None:
                break
            for event in self._told(*heard):
                yield event
        try:
            answer = work.result()
        except RequestError as error:
            yield event_of(error.body())
            return
        for event in self._end(answer):
            yield event

    def _told(self, index: int, ids: Sequence[int], logprobs: Sequence[float]) -> list[str]:
        self._num_told[index] += len(ids)
        piece = "".join([self._texts[index].push(token) for token in ids])
        self._untold[index][0].extend(ids)
        self._untold[index][1].extend(logprobs)
        if not piece:
            return []
        return [*self._begin(index), self._piece(index, {"content": piece})]

    def _begin(self, index: int) -> list[str]:
        if self._has_begun[index] or not self._head.is_chat:
            return []
        self._has_begun[index] = True
        delta = {"role": "assistant", "content": ""}
        return [event_of(self._head.chunk([piece_choice(index, delta)]))]

    def _piece(self, index: int, delta: dict[str, Any]) -> str:
        """A piece with the log-probabilities of all tokens since the last one."""
        logprobs = self._head.logprobs(self._tokenizer, *self._untold[index])
        self._untold[index] = ([], [])
        choice = piece_choice(index, delta, logprobs, is_chat=self._head.is_chat)
        return event_of(self._head.chunk([choice]))

    def _end(self, answer: Answer) -> list[str]:
        events: list[str] = []
        for choice in answer.choices:
            index, response = choice.index, choice.response
            unheard = slice(self._num_told[index], None)
            self._untold[index][0].extend(response.output_tokens[unheard])
            self._untold[index][1].extend(response.output_logprobs[unheard])
            events += self._begin(index)
            if piece := self._texts[index].finish(choice.text):
                events.append(self._piece(index, {"content": piece}))
            for number, call in enumerate(choice.calls_told()):
                events.append(self._piece(index, {"tool_calls": [{"index": number, **call}]}))
            logprobs = self._head.logprobs(self._tokenizer, *self._untold[index])
            events.append(event_of(self._head.chunk([finish_choice(answer, choice, logprobs)])))
        if self._include_usage:
            events.append(event_of({**self._head.chunk([]), "usage": answer.usage()}))
        return [*events, DONE]
