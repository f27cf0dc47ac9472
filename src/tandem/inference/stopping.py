"""Text of a growing list of token ids: half characters held back, stop strings found.

Ids are never changed here; a stop string cuts text only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

HALF_CHARACTER = "\ufffd"
LONGEST_HELD = 64
"""Tokens after which text that still ends in an invalid character is taken as it is."""


class Decoder(Protocol):
    """The part of a tokenizer used here."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...


class TextStream:
    """Decodes a sequence token by token.

    ``text`` never ends in half a character, and its pieces join to ``decode`` of all ids. Each
    step decodes a short window that starts one piece earlier, because a piece's text can depend on
    the piece before it (leading spaces).
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._ids: list[int] = []
        self._window_start = 0
        self._window_read = 0
        self._emitted_in_window = 0
        self.text = ""

    def push(self, token_id: int) -> str:
        """Add one token and return the text that became certain."""
        self._ids.append(token_id)
        window = self._decode(self._ids[self._window_start :])
        held = window.endswith(HALF_CHARACTER)
        if held and len(self._ids) - self._window_read <= LONGEST_HELD:
            stable = window.rstrip(HALF_CHARACTER)
            delta = stable[self._emitted_in_window :]
            self._emitted_in_window = max(self._emitted_in_window, len(stable))
        else:
            delta = window[self._emitted_in_window :]
            self._window_start, self._window_read = self._window_read, len(self._ids)
            self._emitted_in_window = len(self._decode(self._ids[self._window_start :]))
        self.text += delta
        return delta

    def finish(self) -> str:
        """Add and return what was held back, an unfinished character included."""
        delta = self._decode(self._ids[self._window_start :])[self._emitted_in_window :]
        self._emitted_in_window += len(delta)
        self.text += delta
        return delta

    def _decode(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=True)


class StopStrings:
    """Watches a completion for any of ``stop``."""

    def __init__(self, decoder: Decoder, stop: Sequence[str]) -> None:
        self._stream = TextStream(decoder)
        self._stop = tuple(stop)
        self._cut: int | None = None

    def push(self, token_id: int, *, armed: bool = True) -> bool:
        """Add one token; whether a stop string ends in the text that it made certain.

        With ``armed`` false the text grows and nothing is matched.
        """
        before = len(self._stream.text)
        if not self._stream.push(token_id) or not armed:
            return False
        text = self._stream.text
        starts = (text.find(item, max(0, before - len(item) + 1)) for item in self._stop)
        found = [start for start in starts if start >= 0]
        if found:
            self._cut = min(found)
        return bool(found)

    @property
    def text(self) -> str:
        """The text, without the stop string that was found and what follows it."""
        return self._stream.text[: self._cut]
