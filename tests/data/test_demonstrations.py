"""Demonstrations: exactly the assistant's tokens are targets, nothing is dropped in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from tandem.config.schema import DataConfig, SFTStageConfig
from tandem.data.demonstrations import (
    Demonstration,
    conversation,
    conversation_rows,
    open_demonstrations,
)
from tandem.data.examples import ExampleSource
from tandem.data.prompts import open_prompts
from tandem.errors import ConfigError, DataError
from tests.data.chat import CHATML, FAMILIES, FORGETFUL, with_bos, with_template

EOS = 2


@pytest.fixture
def stage(tmp_path: Path) -> Any:
    def write(
        *rows: dict[str, Any], data: dict[str, Any] | None = None, **settings: Any
    ) -> SFTStageConfig:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        source = DataConfig(source="jsonl", path=str(path), shuffle=False, **(data or {}))
        return SFTStageConfig(data=source, **settings)

    return write


def only(source: ExampleSource[Demonstration]) -> Demonstration:
    assert len(source) == 1
    return source.example(0, 0)


def targets(row: Demonstration) -> list[int]:
    return [token for token, on in zip(row.input_ids, row.loss_mask, strict=True) if on]


def test_all_response_tokens_and_eos_are_targets_and_no_prompt_token_is(
    stage: Any, characters: PreTrainedTokenizerBase
) -> None:
    row = only(open_demonstrations(stage({"prompt": "ab", "answer": "cd"}), characters))
    assert characters.decode(row.input_ids) == "abcd<eos>"
    assert row.loss_mask == (False, False, True, True, True)


def test_prompt_ids_are_those_of_rollout(stage: Any, characters: PreTrainedTokenizerBase) -> None:
    for tokenizer, data in (
        (characters, {"prompt_template": "{prompt}="}),
        (with_bos(), {}),
        (with_template(CHATML), {"chat": True, "system_prompt": "s"}),
    ):
        config = stage({"prompt": "ab", "answer": "c"}, data=data)
        row = only(open_demonstrations(config, tokenizer))
        (prompt,) = open_prompts(config.data, tokenizer).all()
        ids = prompt.data["prompt_ids"]
        assert row.input_ids[: len(ids)] == ids
        assert not any(row.loss_mask[: len(ids)])
        assert all(row.loss_mask[len(ids) :])
        assert row.input_ids[-1] == tokenizer.eos_token_id


def test_training_on_the_whole_row_leaves_out_only_the_first_token(
    stage: Any, characters: PreTrainedTokenizerBase
) -> None:
    config = stage({"prompt": "ab", "answer": "c"}, completion_only=False)
    row = only(open_demonstrations(config, characters))
    assert row.loss_mask == (False, True, True, True)


def test_every_assistant_turn_is_a_target_with_its_end_and_nothing_else() -> None:
    tokenizer = with_template(CHATML)
    roles = ("system", "user", "assistant", "user", "assistant")
    texts = ("s", "one", "first", "two", "second")
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]
    row = conversation(messages, tokenizer, "row 1")
    assert tokenizer.decode(targets(row)) == "first<eos>second<eos>"
    assert tokenizer.decode(row.input_ids) == "[s]s\n[u]one\n[a]first<eos>\n[u]two\n[a]second<eos>"


def test_messages_after_the_last_assistant_turn_are_cut_off() -> None:
    tokenizer = with_template(CHATML)
    messages = [{"role": r, "content": "x"} for r in ("user", "assistant", "user")]
    assert tokenizer.decode(conversation(messages, tokenizer, "").input_ids) == "[u]x\n[a]x<eos>"


def test_end_is_learned_even_when_the_template_writes_none() -> None:
    tokenizer = with_template(CHATML.replace("<eos>", ""))
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    row = conversation(messages, tokenizer, "row 1")
    assert tokenizer.decode(targets(row)) == "y\n<eos>"


def test_template_that_rewrites_earlier_turns_makes_a_row_for_each_stretch() -> None:
    tokenizer = with_template(FORGETFUL)
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "why|yes"}]
    rows = conversation_rows([*turns, *turns], tokenizer, "row 1")
    assert [tokenizer.decode(targets(row)) for row in rows] == ["why|yes<eos>"] * 2
    assert [tokenizer.decode(row.input_ids) for row in rows] == [
        "[u]x[a]why|yes<eos>",
        "[u]x[a]yes<eos>[u]x[a]why|yes<eos>",
    ]
    with pytest.raises(DataError, match=r"row 1: the chat template rewrites.* 2 rows"):
        conversation([*turns, *turns], tokenizer, "row 1")


@pytest.mark.parametrize("family", FAMILIES)
def test_targets_of_a_family_are_what_its_assistant_says_each_once(family: str) -> None:
    tokenizer = with_template(FAMILIES[family])
    roles = ("user", "assistant", "user", "assistant")
    texts = ("one", "why|first", "two", "why|second")
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]
    rows = conversation_rows(messages, tokenizer, "row 1")
    said = "".join(tokenizer.decode(targets(row)) for row in rows)
    assert said == "why|first<eos>why|second<eos>"
    assert len(rows) == (2 if family == "qwen_thinking" else 1)
    for row, asked in zip(reversed(rows), (3, 1), strict=False):
        prompt = tokenizer.apply_chat_template(
            messages[:asked], tokenize=False, add_generation_prompt=True
        )
        assert tokenizer.decode(row.input_ids).startswith(prompt)
        assert row.input_ids.count(1) == (family == "llama")
        assert not any(row.loss_mask[: row.loss_mask.index(True)])


def test_turn_that_does_not_follow_its_prompt_is_an_error_with_its_number() -> None:
    tokenizer = with_template(CHATML.replace("[a]", "[a]think"))
    messages = [{"role": r, "content": "x"} for r in ("user", "assistant")]
    with pytest.raises(DataError, match=r"row 1: the chat template .* messages\[1\]"):
        conversation(messages, tokenizer, "row 1")


def test_trl_prompt_and_completion_may_be_messages(stage: Any) -> None:
    tokenizer = with_template(CHATML)
    rows = {
        "prompt": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ],
        "completion": [{"role": "assistant", "content": "d"}],
    }
    row = only(open_demonstrations(stage(rows), tokenizer))
    assert tokenizer.decode(targets(row)) == "d<eos>"
    with pytest.raises(DataError, match="'completion' holds messages and the prompt is text"):
        open_demonstrations(stage({**rows, "prompt": "a"}), tokenizer)


def test_tools_of_a_row_are_rendered(stage: Any) -> None:
    tokenizer = with_template("{% for t in tools or [] %}{{ t['name'] }} {% endfor %}" + CHATML)
    messages = [{"role": r, "content": "x"} for r in ("user", "assistant")]
    for tools in ([{"name": "add"}], '[{"name": "add"}]'):
        row = only(open_demonstrations(stage({"messages": messages, "tools": tools}), tokenizer))
        assert tokenizer.decode(row.input_ids) == "add [u]x\n[a]x<eos>"
    with pytest.raises(DataError, match="'tools'"):
        open_demonstrations(stage({"messages": messages, "tools": 3}), tokenizer)


def test_conversation_without_an_assistant_is_an_error() -> None:
    with pytest.raises(DataError, match="no assistant message"):
        conversation([{"role": "user", "content": "x"}], with_template(CHATML), "row 1")


def test_missing_answer_names_the_alternatives_and_those_present(
    stage: Any, characters: PreTrainedTokenizerBase
) -> None:
    expected = r"rows\.jsonl, row 1: .*'response'.*'messages'.*present: prompt, solutions"
    with pytest.raises(DataError, match=expected):
        open_demonstrations(stage({"prompt": "a", "solutions": ["b"]}), characters)


def test_answer_template_is_filled_from_the_row(
    stage: Any, characters: PreTrainedTokenizerBase
) -> None:
    config = stage(
        {"prompt": "1+1=", "answer": 2, "unit": "m"}, data={"answer_template": "{answer} {unit}"}
    )
    row = only(open_demonstrations(config, characters))
    assert characters.decode(targets(row)) == "2 m<eos>"


def test_overlong_row_is_an_error_that_names_it(
    stage: Any, characters: PreTrainedTokenizerBase
) -> None:
    config = stage({"prompt": "a", "answer": "b"}, {"prompt": "abc", "answer": "de"}, max_length=5)
    with pytest.raises(DataError, match="row 2: the demonstration has 6 tokens > 5"):
        open_demonstrations(config, characters)


def test_overlong_rows_are_filtered_and_counted(
    stage: Any, characters: PreTrainedTokenizerBase
) -> None:
    rows = ({"prompt": "a", "answer": "b"}, {"prompt": "abc", "answer": "de"})
    source = open_demonstrations(stage(*rows, max_length=5, overlong="filter"), characters)
    assert (len(source), source.dropped) == (1, {"too long": 1})


def test_truncation_keeps_a_target_or_drops_the_row_with_a_count(
    stage: Any, characters: PreTrainedTokenizerBase
) -> None:
    rows = ({"prompt": "abcde", "answer": "0123456789"}, {"prompt": "abcdefgh", "answer": "0"})
    source = open_demonstrations(stage(*rows, max_length=8, overlong="truncate"), characters)
    row = only(source)
    assert characters.decode(targets(row)) == "012"
    assert source.dropped == {"no target token left": 1}


def test_no_usable_row_is_an_error_that_names_the_cause(
    stage: Any, characters: PreTrainedTokenizerBase
) -> None:
    config = stage({"prompt": "abcdefgh", "answer": "0"}, max_length=8, overlong="truncate")
    with pytest.raises(DataError, match=r"none of 1 .*1 no target token left.*max_length"):
        open_demonstrations(config, characters)


def test_all_rows_of_both_epochs_are_used_once_across_a_resume_at_the_border(
    stage: Any, characters: PreTrainedTokenizerBase
) -> None:
    rows = [{"prompt": str(i), "answer": str(i)} for i in range(6)]
    config = stage(*rows)
    whole = list(open_demonstrations(config, characters).batches(2, epochs=2))
    source = open_demonstrations(config, characters)
    batches = source.batches(2, epochs=2)
    before = [next(batches) for _ in range(3)]
    resumed = open_demonstrations(config, characters)
    resumed.load_state_dict(source.state_dict())
    after = list(resumed.batches(2, epochs=2))
    assert before + after == whole
    assert len({row for batch in after for row in batch}) == 6


# --- imperfect demonstrations ---------------------------------------------------------------------


def spelling(seed: int = 0, **kwargs: Any) -> SFTStageConfig:
    return SFTStageConfig(
        data=DataConfig(
            task="spell_backward",
            task_kwargs={"min_word_len": 4, "max_word_len": 6},
            size=400,
            seed=seed,
            shuffle=False,
            prompt_template="{word}>",
            **kwargs,
        )
    )


def test_wrong_variant_spells_forwards_with_its_probability(letters: Any) -> None:
    config = spelling(answer_noise="wrong_variant", answer_noise_kwargs={"probability": 0.7})
    source = open_demonstrations(config, letters)
    texts = [letters.decode(source.example(0, i).input_ids) for i in range(400)]
    wrong = 0
    for text in texts:
        word, answer = text.removesuffix("<eos>").split(">")
        assert answer in (word, word[::-1])
        wrong += answer == word
    assert 0.6 < wrong / 400 < 0.8


def test_mistakes_are_a_function_of_the_seed(letters: Any) -> None:
    config = spelling(answer_noise="wrong_variant", answer_noise_kwargs={"probability": 0.5})

    def rows(seed: int) -> list[Demonstration]:
        source = open_demonstrations(config, letters, seed=seed)
        return [source.example(0, i) for i in range(400)]

    assert rows(1) == rows(1) != rows(2)


def test_users_noise_is_loaded_from_its_file(tmp_path: Path, letters: Any) -> None:
    path = tmp_path / "noise.py"
    path.write_text("def shout(row, rng, suffix):\n    return row['word'][0] + suffix\n")
    spec = {"answer_noise": f"{path}:shout", "answer_noise_kwargs": {"suffix": "x"}}
    row = open_demonstrations(spelling(**spec), letters).example(0, 0)
    word, answer = letters.decode(row.input_ids).split(">", 1)
    assert answer == f"{word[0]}x<eos>"


def test_unknown_noise_and_wrong_settings_are_refused(letters: Any) -> None:
    with pytest.raises(ConfigError, match=r"data\.answer_noise.*wrong_variant"):
        open_demonstrations(spelling(answer_noise="typo"), letters)
    with pytest.raises(ConfigError, match=r"answer_noise_kwargs.*probability"):
        open_demonstrations(spelling(answer_noise="wrong_variant"), letters)


def test_noise_on_conversations_is_refused(stage: Any) -> None:
    config = stage(
        {"messages": [{"role": "user", "content": "x"}]},
        data={"answer_noise": "wrong_variant", "answer_noise_kwargs": {"probability": 1.0}},
    )
    with pytest.raises(ConfigError, match="not messages"):
        open_demonstrations(config, with_template(CHATML))
