"""A model directory measured on a file, without a run around it."""

from __future__ import annotations

import json
import shutil

import pytest
from typer.testing import CliRunner

from tandem.cli import app
from tandem.config import load_config
from tandem.trainers import run_eval
from tests.runs.conftest import Problems, Warmed


def settings(warmed: Warmed, problems: Problems) -> dict:
    return {
        "kind": "eval",
        "model": {"path": str(warmed.model)},
        "run": {"threads": 1},
        "eval": {
            "data": {"source": "jsonl", "path": str(problems.heldout), "size": 24},
            "reward": {"name": "exact_match"},
            "generation": {"max_new_tokens": 4},
            "batch_size": 10,
        },
    }


def test_several_samples_agree_with_each_other_and_are_repeatable(
    warmed: Warmed, problems: Problems
) -> None:
    config = load_config(settings(warmed, problems), ["eval.samples=4"])
    result = run_eval(config)
    assert result["num_prompts"] == 24
    assert result["num_failed"] == 0
    assert result["avg@4"] == pytest.approx(result["pass@1"])
    assert result["pass@1"] < result["pass@2"] < result["pass@4"]
    assert result["avg@4_low"] < result["avg@4"] < result["avg@4_high"]
    assert 0 < result["maj@4"] < 1
    again = run_eval(config)
    assert {**again, "wall_s": 0} == {**result, "wall_s": 0}


def test_command_line_measures_a_bare_model(warmed: Warmed, problems: Problems, tmp_path) -> None:
    found = tmp_path / "result.json"
    arguments = ["--data", str(problems.heldout), "--reward", "exact_match", "--json", str(found)]
    options = ["eval.data.size=12", "run.threads=1", f"run.output_dir={tmp_path}"]
    bare = shutil.copytree(warmed.model, tmp_path / "bare")
    result = CliRunner().invoke(app, ["eval", str(bare), *arguments, *options])
    assert result.exit_code == 0, result.exception
    values = json.loads(found.read_text())
    assert values["num_prompts"] == 12
    assert values["avg@1"] == values["pass@1"]
    assert "maj@1" not in values
