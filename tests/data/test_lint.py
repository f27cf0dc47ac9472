"""What the linters say of files and templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from tandem.config.schema import DataConfig
from tandem.data.lint import Report, lint_file
from tandem.data.lint_template import lint_template
from tests.data.chat import CHATML, FAMILIES, FORGETFUL, with_bos, with_template


@pytest.fixture
def lint(tmp_path: Path) -> Any:
    def look(
        *rows: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None = None, **settings: Any
    ) -> Report:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        max_length = settings.pop("max_length", None)
        config = DataConfig(source="jsonl", path=str(path), **settings)
        return lint_file(config, tokenizer, max_length=max_length)

    return look


def counts(report: Report) -> dict[str, int]:
    return {problem.what: problem.count for problem in report.problems}


def test_a_clean_file_has_columns_lengths_and_no_problem(
    lint: Any, characters: PreTrainedTokenizerBase
) -> None:
    report = lint(
        *({"prompt": "a" * n, "answer": "b", "level": n} for n in range(1, 22)),
        tokenizer=characters,
    )
    assert (report.kind, report.num_rows, report.problems) == ("prompts and answers", 21, ())
    assert report.columns["level"].present == 21
    assert dict(report.columns["level"].types) == {"int": 21}
    lengths = report.row_lengths
    assert (lengths.min, lengths.median, lengths.p95, lengths.max) == (3, 13, 22, 23)
    assert report.prompt_lengths.max == 21


def test_duplicates_empty_and_non_ascii_rows_are_counted_with_the_first(lint: Any) -> None:
    report = lint(
        {"prompt": "a", "answer": "é"},
        {"prompt": "b", "answer": " "},
        {"prompt": "a", "answer": "c"},
        {"prompt": "c\ufffd", "answer": 3, "extra": 1},
    )
    assert counts(report) == {
        "column 'answer' has characters beyond ASCII": 1,
        "column 'answer' is empty or white space": 1,
        "the same prompt as an earlier row": 1,
        "column 'prompt' has characters beyond ASCII": 1,
        "column 'prompt' has a broken character": 1,
        "column 'extra' is missing from some rows": 1,
    }
    (again,) = (p for p in report.problems if p.what.startswith("the same"))
    assert again.example.endswith("row 3 (as " + again.example.split(" (as ")[1])
    assert "row 1)" in again.example
    assert not report.has_errors


def test_truncation_and_rows_without_target_are_counted(
    lint: Any, characters: PreTrainedTokenizerBase
) -> None:
    report = lint(
        {"prompt": "abcde", "answer": "0123456789"},
        {"prompt": "abcdefgh", "answer": "0"},
        tokenizer=characters,
        max_length=8,
    )
    assert counts(report) == {
        "longer than 8 tokens": 2,
        "no target token left after truncation": 1,
    }


def test_what_a_run_would_refuse_is_an_error_counted_by_kind(
    lint: Any, characters: PreTrainedTokenizerBase
) -> None:
    report = lint(
        {"prompt": "a", "answer": "Z"},
        {"prompt": "b", "solutions": 1},
        {"prompt": "", "answer": "c"},
        tokenizer=characters,
    )
    assert report.has_errors
    errors = [problem for problem in report.problems if problem.is_error]
    assert any("no token for 'Z'" in problem.what for problem in errors)
    assert any("empty" in problem.what for problem in errors)


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference pairs"),
        ({"prompt": "a", "completion": "b", "label": True}, "labelled completions"),
        ({"messages": [{"role": "user", "content": "a"}]}, "conversations"),
        (
            {"prompt": [{"role": "user", "content": "a"}], "data_source": "x", "reward_model": {}},
            "prompts with a reward (verl)",
        ),
        ({"question": "a"}, "prompts"),
        ({"text": "a"}, "unknown"),
    ],
)
def test_the_kind_of_a_file_follows_from_its_columns(lint: Any, row: Any, kind: str) -> None:
    assert lint(row).kind == kind


def test_both_answers_of_a_pair_are_measured(
    lint: Any, characters: PreTrainedTokenizerBase
) -> None:
    row = {"prompt": "a", "chosen": "bc", "rejected": "defg"}
    lengths = lint(row, tokenizer=characters).row_lengths
    assert (lengths.min, lengths.max) == (4, 6)


def test_a_rewriting_template_is_a_warning_of_the_file(lint: Any) -> None:
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "why|yes"}]
    report = lint({"messages": [*turns, *turns]}, tokenizer=with_template(FORGETFUL))
    assert list(counts(report)) == [
        "the chat template rewrites earlier turns: one row becomes several"
    ]


def levels(template: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for finding in lint_template(with_template(template)):
        found.setdefault(finding.check, set()).add(finding.level)
    return found


ASCII = "".join(map(chr, range(32, 127))) + "\n"


def ascii_tokenizer(template: str) -> PreTrainedTokenizerBase:
    from tandem.models.tiny import character_tokenizer

    tokenizer = character_tokenizer(ASCII)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_and_only_the_forgetful_one_is_split(family: str) -> None:
    # Its thoughts are parted by a bar here; the linter's are in tags.
    template = FAMILIES[family].replace("split('|')", "split('</think>')")
    findings = lint_template(ascii_tokenizer(template))
    assert not [finding for finding in findings if finding.level == "error"]
    warned = [f.text for f in findings if f.level == "warning" and f.check == "prefix extension"]
    expected = family == "qwen_thinking"
    assert len(warned) == expected
    if expected:
        assert "messages[1] and messages[3]" in warned[0]


def test_a_template_without_end_of_turn_is_warned_of() -> None:
    findings = {f.check: f for f in lint_template(ascii_tokenizer(CHATML.replace("<eos>", "")))}
    assert findings["end of turn"].level == "warning"
    assert "stop_token_ids" in findings["end of turn"].text


def test_a_turn_that_does_not_follow_its_prompt_is_an_error_naming_it() -> None:
    findings = lint_template(ascii_tokenizer(CHATML.replace("[a]", "[a]think")))
    (error,) = (finding for finding in findings if finding.level == "error")
    assert error.text.startswith("messages[1]")


def test_a_template_that_refuses_tools_is_an_error_naming_the_turn() -> None:
    refusing = (
        "{% for m in messages %}{% if m['role'] == 'tool' %}"
        "{{ raise_exception('no tools here') }}{% endif %}{% endfor %}" + CHATML
    )
    findings = lint_template(ascii_tokenizer(refusing))
    (error,) = (finding for finding in findings if finding.level == "error")
    assert error.check == "tool round trip"
    assert "messages[2]" in error.text
    assert "no tools here" in error.text


def test_two_bos_tokens_are_an_error() -> None:
    findings = {f.check: f for f in lint_template(ascii_tokenizer("<bos><bos>" + CHATML))}
    assert findings["bos"].level == "error"
    findings = {f.check: f for f in lint_template(ascii_tokenizer("<bos>" + CHATML))}
    assert findings["bos"].level == "ok"


def test_a_tokenizer_without_template_is_an_error() -> None:
    assert [f.level for f in lint_template(with_bos())] == ["error"]
