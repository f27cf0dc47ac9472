"""What of a growing text may be told: never too much, and all of it in the end."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.rollout.tool_calls import CALL_MARKS
from tandem.serve.streaming import GrowingText


class Parts:
    """Tokens by number; those in angle brackets are special."""

    def __init__(self, *parts: bytes) -> None:
        self.parts = parts

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        shown = [self.parts[i] for i in token_ids]
        if skip_special_tokens:
            shown = [part for part in shown if not part.startswith(b"<|")]
        return b"".join(shown).decode("utf-8", "replace")


def pieces(*parts: bytes, text: str, **settings: Any) -> list[str]:
    """What each token makes certain, then what the end adds."""
    given = {"ends": frozenset(), "stop": (), "has_tools": False} | settings
    growing = GrowingText(Parts(*parts), **given)
    return [*(growing.push(index) for index in range(len(parts))), growing.finish(text)]


def test_half_a_character_waits_for_its_other_half() -> None:
    parts = (b"\xe4\xbd", b"\xa0\xe5", b"\xa5\xbd", b"!")
    assert pieces(*parts, text="\u4f60\u597d!") == ["", "\u4f60", "\u597d", "!", ""]
    assert pieces(b"a", b"\xe4", text="a\ufffd") == ["a", "", "\ufffd"]


def test_what_may_become_a_stop_string_waits() -> None:
    assert pieces(b"a", b"E", b"N", b"x", text="aENx", stop=("END",)) == ["a", "", "", "ENx", ""]
    assert pieces(b"aE", b"N", b"D.", text="a", stop=("END", "NO")) == ["a", "", "", ""]
    assert pieces(b"aEND", b"b", text="a", stop=("END",)) == ["a", "", ""]


def test_an_end_that_is_not_special_is_never_told() -> None:
    assert pieces(b"a", b".", text="a", ends={1}) == ["a", "", ""]
    assert pieces(b"a", b".", b"b", text="a.b", ends={1}) == ["a", "", ".b", ""]


@pytest.mark.parametrize("mark", CALL_MARKS)
def test_a_call_is_no_text_even_if_its_mark_is_special(mark: str) -> None:
    parts = (b"hm", b" ", *(bytes([b]) for b in mark.encode()), b"{}", b"x")
    assert "".join(pieces(*parts, text="hm", has_tools=True)) == "hm"
    parts = (b"hm ", b"<|python_tag|>", b"{}")
    assert pieces(*parts, text="hm", has_tools=True) == ["hm", "", "", ""]


def test_with_tools_what_may_be_a_call_alone_waits_for_the_end() -> None:
    assert pieces(b"{", b"a", text="{a", has_tools=True) == ["", "", "{a"]
    assert pieces(b" ", b"a", text=" a", has_tools=True) == ["", "", " a"]
    assert pieces(b"a ", b"b", text="a b", has_tools=True) == ["a", " b", ""]
    assert pieces(b"{", b"a", text="{a") == ["{", "a", ""]


def test_a_text_that_came_out_otherwise_is_not_told_twice() -> None:
    assert pieces(b"a", b"b", text="xyz") == ["a", "b", ""]
