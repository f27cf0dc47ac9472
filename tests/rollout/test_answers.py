"""What a completion votes for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.errors import ConfigError, DataError
from tandem.rollout.answers import load_answer_key, number_answer, text_answer


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("so 12 + 30\n#### 1,042", "1042"),
        ("#### 1042.0 apples", "1042"),
        ("it is 2/4", "1/2"),
        ("0.5", "1/2"),
        ("9 #### none", None),
        ("", None),
    ],
)
def test_equal_numbers_are_one_vote(completion: str, answer: str | None) -> None:
    assert number_answer(completion) == answer


def test_text_differs_in_more_than_case_spaces_and_a_full_stop() -> None:
    assert text_answer("  The  Red\nfox. ") == text_answer("the red fox")
    assert text_answer("the red fox") != text_answer("the redfox")
    assert text_answer(" . ") is None
    assert text_answer("ÄÖ") == text_answer("äö")


def test_auto_looks_at_what_the_reward_looks_at() -> None:
    assert load_answer_key("auto", "gsm8k") is number_answer
    assert load_answer_key("auto", "exact_match") is text_answer
    assert load_answer_key("number", "exact_match") is number_answer


def test_own_function_may_refuse_but_not_return_numbers(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("def key(text):\n    return {'a': None, 'b': 'B'}.get(text, 3)\n")
    key = load_answer_key(f"{path}:key", "auto")
    assert (key("a"), key("b")) == (None, "B")
    with pytest.raises(DataError, match="returned a int"):
        key("c")


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"eval\.answer: got 'nummer', allowed: auto, number"):
        load_answer_key("nummer", "auto")
