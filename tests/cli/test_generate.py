"""``tandem generate``: prompts in, completions out, by hand and by file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.cli import app
from tandem.cli.generate import colour, read_prompts
from tandem.errors import ConfigError, DataError


def invoke(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["generate", *map(str, arguments)])


def test_completions_are_repeatable_under_a_seed_and_differ_between_samples(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    def complete(seed: int) -> list[str]:
        target = tmp_path / "out.jsonl"
        result = invoke(
            tiny_model_dir,
            *("--prompt", "1 + 2 =", "--n", 3, "--max-new-tokens", 12),
            *("--seed", seed, "--jsonl-out", target),
        )
        assert result.exit_code == 0, result.exception
        return [json.loads(line)["completion"] for line in target.read_text().splitlines()]

    first = complete(5)
    assert complete(5) == first
    assert len(set(first)) == 3
    assert set(complete(60)).isdisjoint(first)


def test_completions_are_printed_without_the_prompt(tiny_model_dir: Path) -> None:
    result = invoke(tiny_model_dir, "-p", "12+34", "--max-new-tokens", 3, "--temperature", 0)
    assert result.exit_code == 0, result.exception
    assert "12+34" not in result.output
    assert result.output.strip("\n") != ""


def test_jsonl_rows_keep_their_columns_and_get_completions(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "1 + 1", "id": 7}\n\n{"prompt": "2", "id": 8}\n')
    result = invoke(
        tiny_model_dir,
        *("--jsonl-in", source, "--jsonl-out", target),
        *("--n", 2, "--max-new-tokens", 4, "--temperature", 0),
    )
    assert result.exit_code == 0, result.exception
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [(row["id"], row["sample"]) for row in rows] == [(7, 0), (7, 1), (8, 0), (8, 1)]
    assert rows[0]["completion"] == rows[1]["completion"]
    for row in rows:
        assert 1 <= len(row["output_tokens"]) == len(row["output_logprobs"]) <= 4
        assert row["stop_reason"] in ("stop", "length")


def test_nothing_to_complete_is_an_error(tiny_model_dir: Path) -> None:
    result = invoke(tiny_model_dir)
    assert isinstance(result.exception, ConfigError)
    assert "--prompt" in str(result.exception)


@pytest.mark.parametrize("line", [b"{", b"[]", b'{"text": "a"}', b'{"prompt": 3}', b"\xff\xfe"])
def test_bad_prompt_line_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt": "ok"}\n' + line + b"\n")
    with pytest.raises(DataError, match="line 2"):
        read_prompts(path)


def test_line_separator_inside_a_prompt_ends_no_line(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\n', encoding="utf-8")
    assert read_prompts(path) == [{"prompt": "a\u2028b"}]


def test_output_that_cannot_be_written_is_a_config_error(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    result = invoke(tiny_model_dir, "-p", "1", "--jsonl-out", tmp_path / "none" / "out.jsonl")
    assert isinstance(result.exception, ConfigError)
    assert "--jsonl-out" in str(result.exception)


def test_output_does_not_replace_the_input(tiny_model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "1 + 2 ="}\n')
    result = invoke(tiny_model_dir, "--jsonl-in", path, "--jsonl-out", path)
    assert isinstance(result.exception, ConfigError)
    assert "--jsonl-in" in str(result.exception)
    assert path.read_text() == '{"prompt": "1 + 2 ="}\n'


def test_character_without_a_token_is_an_error(tiny_model_dir: Path) -> None:
    result = invoke(tiny_model_dir, "-p", "1", "-p", "2é")
    assert isinstance(result.exception, DataError)
    assert "prompt 2: the tokenizer has no token for 'é'" in str(result.exception)


def test_missing_prompt_file_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        read_prompts(tmp_path / "none.jsonl")


def test_colours_follow_probability() -> None:
    assert [colour(x) for x in (0.0, -0.69, -0.7, -2.3, -2.31)] == [
        "green",
        "green",
        "yellow",
        "yellow",
        "red",
    ]


def test_interactive_mode_completes_line_by_line_until_the_input_ends(
    tiny_model_dir: Path,
) -> None:
    result = CliRunner().invoke(
        app,
        ["generate", str(tiny_model_dir), "-i", "--max-new-tokens", "3", "--temperature", "0"],
        input="1+2\n\n1+é\n1+2\n",
    )
    assert result.exit_code == 0, result.exception
    answers = [line.lstrip("> ") for line in result.output.splitlines() if line.strip("> ")]
    assert answers[0] == answers[-1]
    assert "no token" in answers[1]


def test_stop_text_ends_a_completion_and_is_cut(tiny_model_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    arguments = ["-p", "1 + 2 =", "--max-new-tokens", 20, "--seed", 5, "--jsonl-out", target]
    assert invoke(tiny_model_dir, *arguments).exit_code == 0
    whole = json.loads(target.read_text())["completion"]
    stop = whole[4:6]
    assert invoke(tiny_model_dir, *arguments, "--stop", stop).exit_code == 0
    row = json.loads(target.read_text())
    assert (row["completion"], row["stop_reason"]) == (whole[: whole.index(stop)], "stop")


@pytest.mark.parametrize("option", [("--top-p", "0"), ("--top-k", "-1"), ("--dtype", "int8")])
def test_wrong_options_are_config_errors(tiny_model_dir: Path, option: tuple[str, str]) -> None:
    result = invoke(tiny_model_dir, "-p", "1", *option)
    assert isinstance(result.exception, ConfigError)
