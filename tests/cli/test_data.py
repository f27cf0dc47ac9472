"""``tandem data``: what is printed and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.cli import app
from tandem.errors import ConfigError
from tests.data.chat import CHATML
from tests.data.test_lint import ascii_tokenizer

RUNNER = CliRunner()


def write(path: Path, *rows: dict[str, object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_lint_prints_columns_and_lengths(tmp_path: Path, tiny_model_dir: Path) -> None:
    file = write(tmp_path / "rows.jsonl", {"q": "1+1", "a": "2"}, {"q": "1+1", "a": "2"})
    columns = ["--column", "prompt=q", "--column", "answer=a"]
    result = RUNNER.invoke(app, ["data", "lint", file, "--model", str(tiny_model_dir), *columns])
    assert result.exit_code == 0, result.output
    assert "2 rows, prompts and answers" in result.output
    assert "tokens of a row: 5 to 5" in result.output
    assert "the same prompt as an earlier row: 1" in result.output


def test_a_file_that_a_run_would_refuse_ends_with_the_code_of_data(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    file = write(tmp_path / "rows.jsonl", {"prompt": "Ü", "answer": "2"})
    result = RUNNER.invoke(app, ["data", "lint", file, "--model", str(tiny_model_dir)])
    assert result.exit_code == 3
    assert "no token for 'Ü'" in result.output


def test_lengths_need_a_tokenizer(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", {"prompt": "a"})
    result = RUNNER.invoke(app, ["data", "lint", file, "--max-length", "3"])
    assert isinstance(result.exception, ConfigError)
    result = RUNNER.invoke(app, ["data", "lint", file, "--column", "prompt"])
    assert isinstance(result.exception, ConfigError)


@pytest.mark.parametrize(("template", "code"), [(CHATML, 0), ("<bos><bos>" + CHATML, 3)])
def test_lint_template_ends_by_what_it_finds(tmp_path: Path, template: str, code: int) -> None:
    ascii_tokenizer(template).save_pretrained(tmp_path)
    result = RUNNER.invoke(app, ["data", "lint-template", str(tmp_path)])
    assert result.exit_code == code, result.output
    assert "prefix extension" in result.output
