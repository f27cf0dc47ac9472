"""Preference data: columns, prompts, made-up pairs, and what is left out."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from tandem.config.schema import DataConfig, StageConfig
from tandem.data.demonstrations import Demonstration, fit_row
from tandem.data.noise import near_miss
from tandem.data.preferences import Pair, open_judged, open_pairs
from tandem.errors import ConfigError, DataError
from tests.data.chat import CHATML, with_bos, with_template

EOS = 2


@pytest.fixture
def stage(tmp_path: Path) -> Any:
    def write(*rows: Any, data: dict[str, Any] | None = None, **settings: Any) -> StageConfig:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        source = DataConfig(source="jsonl", path=str(path), shuffle=False, **(data or {}))
        return StageConfig(data=source, **settings)

    return write


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def texts(tokenizer: PreTrainedTokenizerBase, row: Demonstration) -> tuple[str, str]:
    """What is prompt and what is response in one row."""
    start = row.loss_mask.index(True)
    assert all(row.loss_mask[start:])
    return tokenizer.decode(row.input_ids[:start]), tokenizer.decode(row.input_ids[start:])


def only(config: StageConfig, tokenizer: PreTrainedTokenizerBase, **options: Any) -> Pair:
    (pair,) = open_pairs(config, tokenizer, **options).all()
    return pair


# --- columns and prompts --------------------------------------------------------------------------


def test_text_pairs_share_the_prompt_and_train_on_the_response(
    stage: Any, characters: PreTrainedTokenizerBase
) -> None:
    config = stage({"prompt": "ab", "chosen": "cd", "rejected": "e", "margin": 2})
    pair = only(config, characters)
    assert texts(characters, pair.chosen) == ("ab", "cd<eos>")
    assert texts(characters, pair.rejected) == ("ab", "e<eos>")
    assert pair.margin == 2.0
    assert pair.reference is None


def test_messages_without_a_prompt_have_it_in_common(stage: Any) -> None:
    tokenizer = with_template(CHATML)
    start = [user("hi"), assistant("yes"), user("go")]
    row = {"chosen": [*start, assistant("ab")], "rejected": [*start, assistant("cd")]}
    pair = only(stage(row), tokenizer)
    # The assistant's turn inside the prompt is not trained on.
    assert texts(tokenizer, pair.chosen) == ("[u]hi\n[a]yes<eos>\n[u]go\n[a]", "ab<eos>")
    assert texts(tokenizer, pair.rejected) == ("[u]hi\n[a]yes<eos>\n[u]go\n[a]", "cd<eos>")
    explicit = {"prompt": start, "chosen": [assistant("ab")], "rejected": [assistant("cd")]}
    assert only(stage(explicit), tokenizer) == pair
    # A text prompt beside whole conversations, and a prompt that they repeat.
    assert only(stage({"prompt": "go", **row}), tokenizer) == pair
    assert only(stage({"prompt": start, **row}), tokenizer) == pair
    answers = {"prompt": start, "chosen": "ab", "rejected": "cd"}
    assert only(stage(answers), tokenizer) == pair


def test_the_system_prompt_stands_before_both(stage: Any) -> None:
    tokenizer = with_template(CHATML)
    row = {"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]}
    pair = only(stage(row, data={"system_prompt": "s"}), tokenizer)
    assert texts(tokenizer, pair.chosen)[0] == "[s]s\n[u]a\n[a]"


def test_bos_comes_once(stage: Any) -> None:
    tokenizer = with_bos()
    pair = only(stage({"prompt": "ab", "chosen": "c", "rejected": "u"}), tokenizer)
    assert pair.chosen.input_ids.count(1) == 1
    assert pair.chosen.input_ids[0] == 1


def test_texts_may_stand_alone_where_no_prompt_is_needed(
    stage: Any, characters: PreTrainedTokenizerBase
) -> None:
    config = stage({"chosen": "abc", "rejected": "abd"})
    pair = only(config, characters, needs_prompt=False)
    assert characters.decode(pair.chosen.input_ids) == "abc<eos>"
    with pytest.raises(DataError, match="'prompt'"):
        open_pairs(config, characters)


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"prompt": "a", "chosen": "b", "solutions": "c"}, "'rejected'.*prompt, chosen, solutions"),
        ({"prompt": "a", "response": "b"}, "'chosen'.*prompt, response"),
        ({"prompt": "a", "chosen": "b", "rejected": [user("c")]}, "two texts or two message"),
        ({"chosen": [user("a")], "rejected": [user("b")]}, "begin differently"),
        (
            {"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("b")]},
            "do not differ",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "big"}, "'margin'.*'big'"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": True}, "'margin'"),
    ],
)
def test_bad_rows_are_named_with_what_they_have(
    stage: Any, characters: PreTrainedTokenizerBase, row: Any, error: str
) -> None:
    with pytest.raises(DataError, match=rf"rows\.jsonl, row 1: .*{error}"):
        open_pairs(stage(row), characters)


def test_some_margins_and_some_not_are_refused(
    stage: Any, characters: PreTrainedTokenizerBase
) -> None:
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(DataError, match="margin"):
        open_pairs(stage(row, {**row, "margin": 1.0}), characters)


def test_reference_columns_are_read_when_asked_for(
    stage: Any, characters: PreTrainedTokenizerBase
) -> None:
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    known = {**row, "ref_chosen_logps": -1.5, "ref_rejected_logps": -2}
    assert only(stage(known), characters, needs_reference=True).reference == (-1.5, -2.0)
    with pytest.raises(DataError, match="ref_chosen_logps"):
        open_pairs(stage(row), characters, needs_reference=True)


def test_columns_can_be_mapped(stage: Any, characters: PreTrainedTokenizerBase) -> None:
    row = {"q": "a", "good": "b", "bad": "c"}
    columns = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    pair = only(stage(row, data={"columns": columns}), characters)
    assert texts(characters, pair.rejected) == ("a", "c<eos>")


def test_parquet_rows_are_read_alike(tmp_path: Path, characters: PreTrainedTokenizerBase) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "rows.parquet"
    table = pyarrow.Table.from_pylist([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    pyarrow.parquet.write_table(table, path)
    config = StageConfig(data=DataConfig(source="parquet", path=str(path)))
    assert texts(characters, only(config, characters).chosen) == ("a", "b<eos>")


# --- what is left out -----------------------------------------------------------------------------


def test_each_row_has_its_own_budget() -> None:
    """B94: prompt of 5 tokens, chosen 1, rejected 10, at most 8; then a prompt of 8."""

    def row(prompt: int, response: int) -> Demonstration:
        mask = (False,) * prompt + (True,) * response
        return Demonstration(tuple(range(prompt + response)), mask)

    lost: Counter[str] = Counter()
    for response, kept in ((1, 1), (10, 3)):
        fitted = fit_row(row(5, response), 8, "truncate", "here", lost)
        assert fitted is not None
        assert sum(fitted.loss_mask) == kept
    assert not lost
    assert fit_row(row(8, 1), 8, "truncate", "here", lost) is None
    assert sum(lost.values()) == 1


def test_pairs_that_lose_a_response_are_dropped_and_counted(
    stage: Any, characters: PreTrainedTokenizerBase
) -> None:
    long = {"prompt": "abcdefgh", "chosen": "i", "rejected": "j"}
    short = {"prompt": "abcde", "chosen": "f", "rejected": "0123456789"}
    config = stage(long, short, max_length=8, overlong="truncate")
    source = open_pairs(config, characters)
    assert source.dropped == {"no target token left": 1}
    (pair,) = source.all()
    assert texts(characters, pair.chosen) == ("abcde", "f<eos>")
    assert texts(characters, pair.rejected) == ("abcde", "012")
    filtered = open_pairs(
        stage(long, {**short, "rejected": "g"}, max_length=8, overlong="filter"), characters
    )
    assert (len(filtered), filtered.dropped) == (1, {"too long": 1})
    with pytest.raises(DataError, match=r"row 1: .*10 tokens > 8"):
        open_pairs(stage(long, short, max_length=8), characters)
    with pytest.raises(DataError, match=r"none of 1 .*1 no target token left"):
        open_pairs(stage(long, max_length=8, overlong="truncate"), characters)


def test_a_pair_fits_a_micro_batch(stage: Any, characters: PreTrainedTokenizerBase) -> None:
    row = {"prompt": "abc", "chosen": "def", "rejected": "g"}
    config = stage(row, train={"max_tokens_per_microbatch": 12})
    with pytest.raises(DataError, match="7 tokens > 6"):
        open_pairs(config, characters)


def test_equal_responses_are_dropped(stage: Any, characters: PreTrainedTokenizerBase) -> None:
    row = {"prompt": "a", "chosen": "b", "rejected": "b"}
    source = open_pairs(stage(row, {**row, "rejected": "c"}), characters)
    assert (len(source), source.dropped) == (1, {"equal responses": 1})


# --- pairs from answers ---------------------------------------------------------------------------


def spelling(**changes: Any) -> StageConfig:
    data = {
        "task": "spell_backward",
        "size": 40,
        "prompt_template": "{word}>",
        "answer_noise": "near_miss",
        "task_kwargs": {"min_word_len": 3, "max_word_len": 4},
    }
    return StageConfig(data=DataConfig(**{**data, **changes}))


def test_a_task_gives_the_right_answer_and_a_wrong_one(letters: PreTrainedTokenizerBase) -> None:
    noise = {"answer_noise": "wrong_variant", "answer_noise_kwargs": {"probability": 1.0}}
    source = open_pairs(spelling(**noise), letters)
    for pair in source.all():
        prompt, right = texts(letters, pair.chosen)
        _, wrong = texts(letters, pair.rejected)
        word = prompt.removesuffix(">")
        assert right == word[::-1] + "<eos>"
        assert wrong == word + "<eos>"
    assert len(source) + source.dropped.get("equal responses", 0) == 40


def test_near_misses_are_wrong_and_the_same_in_every_epoch(
    letters: PreTrainedTokenizerBase,
) -> None:
    first, again = (open_pairs(spelling(), letters) for _ in range(2))
    other = open_pairs(spelling(), letters, seed=1)
    assert first.all() == again.all()
    assert first.all() != other.all()
    for pair in first.all():
        right, wrong = texts(letters, pair.chosen)[1], texts(letters, pair.rejected)[1]
        assert sorted(right) == sorted(wrong) or len(wrong) == len(right) - 1
        assert right != wrong


@pytest.mark.parametrize("answer", ["7", "-3", "120"])
def test_a_near_miss_of_a_number_is_another_number(answer: str) -> None:
    found = {int(near_miss({"answer": answer}, Random(i), largest=3)) for i in range(50)}
    assert found == {int(answer) + k for k in (-3, -2, -1, 1, 2, 3)}


def test_a_near_miss_of_equal_characters_is_shorter() -> None:
    assert near_miss({"answer": "aaa"}, Random(0)) == "aa"


def test_a_wrong_answer_that_the_task_accepts_is_not_a_rejected_one(
    tmp_path: Path, letters: PreTrainedTokenizerBase
) -> None:
    """The task's scorer ignores case; a mistake in case alone leaves no pair."""
    file = tmp_path / "noise.py"
    file.write_text("def louder(row, rng):\n    return row['answer'].swapcase()\n")
    with pytest.raises(DataError, match="40 equal responses"):
        open_pairs(spelling(answer_noise=f"{file}:louder"), letters)


def test_noise_and_own_pairs_exclude_each_other(
    stage: Any, characters: PreTrainedTokenizerBase
) -> None:
    row = {"prompt": "a", "answer": "x", "chosen": "b", "rejected": "c"}
    with pytest.raises(ConfigError, match="answer_noise"):
        open_pairs(stage(row, data={"answer_noise": "near_miss"}), characters)
    with pytest.raises(ConfigError, match="answer_template"):
        open_pairs(stage(row, data={"answer_template": "{answer}!"}), characters)


# --- single responses -----------------------------------------------------------------------------


def test_labelled_rows_and_pairs_become_judged_responses(
    stage: Any, characters: PreTrainedTokenizerBase
) -> None:
    rows = [
        {"prompt": "a", "completion": "b", "label": True},
        {"prompt": "a", "completion": "c", "label": False},
    ]
    single = open_judged(stage(*rows), characters).all()
    assert [item.is_desirable for item in single] == [True, False]
    assert texts(characters, single[1].row) == ("a", "c<eos>")
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert open_judged(stage(pair), characters).all() == single


@pytest.mark.parametrize("label", ["yes", 2, None, 1.0])
def test_a_label_is_true_or_false(
    stage: Any, characters: PreTrainedTokenizerBase, label: Any
) -> None:
    config = stage({"prompt": "a", "completion": "b", "label": label})
    with pytest.raises(DataError, match="'label'"):
        open_judged(config, characters)


def test_a_labelled_conversation_trains_on_the_completion(stage: Any) -> None:
    tokenizer = with_template(CHATML)
    row = {"prompt": [user("a")], "completion": [assistant("b")], "label": 1}
    (item,) = open_judged(stage(row), tokenizer).all()
    assert texts(tokenizer, item.row) == ("[u]a\n[a]", "b<eos>")
