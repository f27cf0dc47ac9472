"""Prompts: rendering, one BOS, length policy, and a position that survives a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from tandem.config.schema import DataConfig
from tandem.data.prompts import PromptSource, fit_prompt, open_prompts
from tandem.errors import ConfigError, DataError
from tests.data.chat import CHATML, with_bos, with_template

BOS_TEMPLATE = "<s>{% for m in messages %}u:{{ m['content'] }}{% endfor %}"


@pytest.fixture
def source(tmp_path: Path) -> Any:
    def write(*rows: dict[str, Any], **settings: Any) -> DataConfig:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return DataConfig(source="jsonl", path=str(path), **settings)

    return write


def test_prompt_carries_text_ids_answer_and_every_column(
    source: Any, characters: PreTrainedTokenizerBase
) -> None:
    config = source({"question": "1+1", "answer": "2", "level": 3}, prompt_template="{question}=")
    (prompt,) = open_prompts(config, characters).all()
    assert prompt.data["prompt"] == "1+1="
    assert characters.decode(prompt.data["prompt_ids"]) == "1+1="
    assert (prompt.data["answer"], prompt.data["level"]) == ("2", 3)


def test_template_knows_column_names_only(source: Any, characters: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match=r"row 1: missing column 'qestion'.*present: question"):
        open_prompts(source({"question": "1"}, prompt_template="{qestion}"), characters)
    config = source({"question": "1"}, prompt_template="{{x}} {question.__class__}")
    with pytest.raises(DataError, match=r"no token for '\.', '_', '\{', '\}' in '\{x\} "):
        open_prompts(config, characters)


def test_missing_prompt_column_names_the_alternatives_and_those_present(
    source: Any, characters: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl, row 1: .*'prompt'.*present: text, label"):
        open_prompts(source({"text": "a", "label": 1}), characters)


def test_character_without_token_is_an_error_not_unk(
    source: Any, characters: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(DataError, match=r"row 2: .*no token for 'Z', 'ü' in 'aZü'"):
        open_prompts(source({"prompt": "é"}, {"prompt": "aZü"}), characters)


def test_empty_prompt_is_an_error(source: Any, characters: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match="row 1: the prompt is empty"):
        open_prompts(source({"prompt": ""}), characters)


def test_column_that_is_not_text_is_an_error(
    source: Any, characters: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(DataError, match="'question': expected text or a number, got list"):
        open_prompts(source({"question": ["a"]}, prompt_template="{question}"), characters)


@pytest.mark.parametrize("adds_eos", [False, True])
@pytest.mark.parametrize("text", ["ab", "<s>ab"])
def test_plain_prompt_has_exactly_one_bos_and_no_eos(
    source: Any, text: str, adds_eos: bool
) -> None:
    (prompt,) = open_prompts(source({"prompt": text}), with_bos(adds_eos=adds_eos)).all()
    assert prompt.data["prompt_ids"] == (1, 3, 4)


def test_bos_written_by_the_chat_template_is_not_doubled(source: Any) -> None:
    (prompt,) = open_prompts(source({"prompt": "ab"}, chat=True), with_bos(BOS_TEMPLATE)).all()
    assert prompt.data["prompt_ids"] == (1, 6, 7, 3, 4)


def test_chat_renders_system_and_user_and_asks_for_the_answer(source: Any) -> None:
    tokenizer = with_template(CHATML)
    config = source({"prompt": "hi"}, chat=True, system_prompt="be brief")
    (prompt,) = open_prompts(config, tokenizer).all()
    assert tokenizer.decode(prompt.data["prompt_ids"]) == "[s]be brief\n[u]hi\n[a]"
    assert prompt.data["prompt"][1] == {"role": "user", "content": "hi"}


def test_prompt_column_may_hold_messages(source: Any) -> None:
    tokenizer = with_template(CHATML)
    messages = [{"role": "user", "content": "x"}]
    (prompt,) = open_prompts(source({"prompt": messages}), tokenizer).all()
    assert tokenizer.decode(prompt.data["prompt_ids"]) == "[u]x\n[a]"
    with pytest.raises(DataError, match=r"messages\[0\]: expected an object with role"):
        open_prompts(source({"prompt": ["x"]}), tokenizer)


def test_chat_without_a_template_and_system_prompt_without_chat_are_refused(
    source: Any, characters: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        open_prompts(source({"prompt": "a"}, chat=True), characters)
    with pytest.raises(ConfigError, match=r"data\.system_prompt"):
        open_prompts(source({"prompt": "a"}, system_prompt="b"), characters)


def test_template_that_refuses_messages_is_a_data_error(source: Any) -> None:
    tokenizer = with_template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match=r"row 1: .*roles must alternate"):
        open_prompts(source({"prompt": "a"}, chat=True), tokenizer)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("filter", None), ("truncate_left", (3, 4, 5, 6)), ("truncate_right", (1, 2, 3, 4))],
)
def test_overlong_prompt_follows_the_policy(policy: Any, expected: tuple[int, ...] | None) -> None:
    assert fit_prompt((1, 2, 3, 4, 5, 6), 4, policy, "row 1") == expected
    assert fit_prompt((1, 2, 3, 4), 4, policy, "row 1") == (1, 2, 3, 4)


def test_overlong_prompt_is_an_error_with_row_and_lengths() -> None:
    with pytest.raises(DataError, match="row 7: the prompt has 6 tokens > 4"):
        fit_prompt((1, 2, 3, 4, 5, 6), 4, "error", "file, row 7")


def test_filtered_prompts_are_counted_and_none_left_is_an_error(
    source: Any, characters: PreTrainedTokenizerBase
) -> None:
    config = source({"prompt": "abc"}, {"prompt": "abcdef"})
    opened = open_prompts(config, characters, max_prompt_tokens=4, overlong="filter")
    assert (len(opened), opened.dropped) == (1, 1)
    with pytest.raises(DataError, match="all 2 prompts are longer than 2"):
        open_prompts(config, characters, max_prompt_tokens=2, overlong="filter")


def stream(count: int = 10, seed: int = 3) -> PromptSource:
    return PromptSource([{"prompt_ids": (i,)} for i in range(count)], seed=(seed,))


def test_prompts_fetched_ahead_are_the_ones_a_resume_gives() -> None:
    ahead = stream()
    fetched = [next(ahead) for _ in range(5)]
    consumed_three = {**ahead.state_dict(), "position": 3}
    resumed = stream()
    resumed.load_state_dict(consumed_three)
    rest = [next(resumed) for _ in range(7)]
    assert rest[:2] == fetched[3:]
    seen = [prompt.data["prompt_ids"][0] for prompt in fetched[:3] + rest]
    assert sorted(seen) == list(range(10))


def test_random_access_agrees_with_iteration_and_leaves_the_cursor_alone() -> None:
    prompts = stream(4)
    addressed = [prompts.prompt(epoch, position) for epoch in (0, 1) for position in range(4)]
    assert prompts.address == (0, 0)
    assert [next(prompts) for _ in range(8)] == addressed
    assert addressed[5].episode_id == (1 << 40) + 1


def test_resume_on_changed_prompts_is_refused() -> None:
    changed = PromptSource([{"prompt_ids": (i + 1,)} for i in range(10)], seed=(3,))
    with pytest.raises(DataError, match="digest"):
        changed.load_state_dict(stream().state_dict())


def test_run_seed_and_data_seed_both_shuffle(
    source: Any, characters: PreTrainedTokenizerBase
) -> None:
    rows = [{"prompt": str(i)} for i in range(30)]

    def first_epoch(run: int, data: int) -> list[str]:
        prompts = open_prompts(source(*rows, seed=data), characters, seed=run)
        return [prompts.prompt(0, i).data["prompt"] for i in range(30)]

    orders = [first_epoch(0, 0), first_epoch(1, 0), first_epoch(0, 1)]
    assert first_epoch(0, 0) == orders[0]
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_verl_columns_are_known_and_reach_the_reward(source: Any) -> None:
    row = {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": "ab"}],
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "train", "index": 7},
    }
    (prompt,) = open_prompts(source(row), with_template(CHATML)).all()
    assert prompt.data["answer"] == "4"
    assert prompt.data["data_source"] == "gsm8k"
    assert prompt.data["extra_info"] == {"split": "train", "index": 7}
    (prompt,) = open_prompts(source({**row, "answer": "own"}), with_template(CHATML)).all()
    assert prompt.data["answer"] == "own"


def test_a_column_may_be_mapped_from_inside_another(
    source: Any, characters: PreTrainedTokenizerBase
) -> None:
    row = {"question": "1", "extra_info": {"answer": "2", "level": 3}}
    config = source(row, columns={"answer": "extra_info.answer"})
    (prompt,) = open_prompts(config, characters).all()
    assert prompt.data["answer"] == "2"
    assert prompt.data["extra_info"]["level"] == 3
    with pytest.raises(DataError, match=r"'extra_info\.x'"):
        open_prompts(source(row, columns={"answer": "extra_info.x"}), characters)


def test_tools_of_a_row_are_shown_in_its_prompt(source: Any) -> None:
    template = "{% for t in tools or [] %}{{ t['name'] }} {% endfor %}" + CHATML
    row = {"prompt": [{"role": "user", "content": "ab"}], "tools": [{"name": "add"}]}
    (prompt,) = open_prompts(source(row), with_template(template)).all()
    tokenizer = with_template(template)
    assert tokenizer.decode(prompt.data["prompt_ids"]) == "add [u]ab\n[a]"
    assert prompt.data["tools"] == [{"name": "add"}]
