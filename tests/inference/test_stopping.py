"""Text that grows token by token: no half characters, exact stop strings."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tandem.inference.stopping import LONGEST_HELD, StopStrings, TextStream


class Pieces:
    """A tokenizer whose tokens are byte strings."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return b"".join(self._pieces[i] for i in token_ids).decode(errors="replace")


class LeadingSpace:
    """Drops the space before the first word, as SentencePiece decoders do."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(f" w{i}" for i in token_ids).removeprefix(" ")


HELLO = Pieces(b"\xe4\xbd", b"\xa0\xe5", b"\xa5\xbd")


def test_characters_split_over_tokens_come_out_whole() -> None:
    stream = TextStream(HELLO)
    assert [stream.push(i) for i in range(3)] == ["", "你", "好"]
    assert stream.text == "你好"
    assert stream.finish() == ""


def test_an_unfinished_character_is_marked_once_at_the_end() -> None:
    stream = TextStream(HELLO)
    assert stream.push(0) == ""
    assert stream.finish() == "\ufffd"
    assert stream.text == HELLO.decode([0])


def test_pieces_join_to_the_decoding_of_all_ids() -> None:
    stream = TextStream(LeadingSpace())
    pieces = [stream.push(i) for i in (3, 1, 4, 1, 5)]
    assert "".join(pieces) == "w3 w1 w4 w1 w5"


def test_invalid_bytes_for_ever_do_not_hold_text_back_for_ever() -> None:
    decoder = Pieces(b"\xff")
    stream = TextStream(decoder)
    for _ in range(LONGEST_HELD + 5):
        stream.push(0)
    assert stream.text == "\ufffd" * (LONGEST_HELD + 1)
    stream.finish()
    assert stream.text == decoder.decode([0] * (LONGEST_HELD + 5))


@pytest.mark.parametrize(
    ("pieces", "stop", "hit_at", "text"),
    [
        ((b"ab", b"cS", b"TO", b"Pd"), ("STOP",), 3, "abc"),
        ((b"a", b"bb", b"b"), ("bb", "ab"), 1, ""),
        ((b"xx", b"yENDz"), ("END",), 1, "xxy"),
        ((b"\xe4\xbd", b"\xa0", b"\xe5\xa5\xbd"), ("你好",), 2, ""),
    ],
)
def test_a_stop_string_cuts_text_where_it_begins(
    pieces: tuple[bytes, ...], stop: tuple[str, ...], hit_at: int, text: str
) -> None:
    watch = StopStrings(Pieces(*pieces), stop)
    hits = [watch.push(i) for i in range(hit_at + 1)]
    assert hits == [False] * hit_at + [True]
    assert watch.text == text


def test_an_unarmed_match_is_passed_over() -> None:
    watch = StopStrings(Pieces(b"a", b"long", b"b"), ("a", "longer-than-all"))
    assert not watch.push(0, armed=False)
    assert not watch.push(1)
    assert watch.push(0)
    assert watch.text == "along"
