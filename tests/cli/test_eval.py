"""``tandem eval``: which configuration and which model a target stands for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tandem.trainers
from tandem.cli import app
from tandem.config import load_config, to_yaml
from tandem.errors import ConfigError
from tandem.observe import write_summary


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A finished run with an exported model."""
    folder = tmp_path / "outputs" / "run"
    model = folder / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    config = load_config(
        {"model": {"tiny": {}}, "data": {"task": "chain_sum", "size": 10}}, kind="rl"
    )
    (folder / "config.yaml").write_text(to_yaml(config))
    write_summary(folder, {"model_dir": str(model)})
    return folder


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    configs: list[Any] = []

    def run_eval(config: Any) -> dict[str, float]:
        configs.append(config)
        return {"accuracy": 0.75, "accuracy_low": 0.5, "accuracy_high": 0.875}

    monkeypatch.setattr(tandem.trainers, "run_eval", run_eval, raising=False)
    return configs


def invoke(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def test_run_and_its_model_mean_the_same(run_dir: Path, evaluated: list[Any]) -> None:
    for target in (run_dir, run_dir / "model"):
        result = invoke(target, "run.seed=3")
        assert result.exit_code == 0, result.exception
        assert "0.7500" in result.output
        assert "0.5000 to 0.8750" in result.output
    assert [config.model.path for config in evaluated] == [str(run_dir / "model")] * 2
    assert [config.run.seed for config in evaluated] == [3, 3]


def test_moved_run_finds_its_model(run_dir: Path, evaluated: list[Any], tmp_path: Path) -> None:
    moved = run_dir.rename(tmp_path / "moved")
    assert invoke(moved).exit_code == 0
    assert evaluated[0].model.path == str(moved / "model")


def test_config_file_keeps_its_model_unless_told_otherwise(
    run_dir: Path, evaluated: list[Any]
) -> None:
    assert invoke(run_dir / "config.yaml").exit_code == 0
    assert invoke(run_dir / "config.yaml", "--model", run_dir / "model").exit_code == 0
    assert [config.model.path for config in evaluated] == [None, str(run_dir / "model")]


def test_result_is_written_as_json(run_dir: Path, evaluated: list[Any], tmp_path: Path) -> None:
    assert invoke(run_dir, "--json", tmp_path / "result.json").exit_code == 0
    assert json.loads((tmp_path / "result.json").read_text())["accuracy"] == 0.75


def test_model_without_a_run_needs_data(run_dir: Path) -> None:
    (run_dir / "config.yaml").unlink()
    result = invoke(run_dir / "model")
    assert isinstance(result.exception, ConfigError)
    assert "--data" in str(result.exception)


def test_model_without_a_run_is_measured_on_any_data(run_dir: Path, evaluated: list[Any]) -> None:
    (run_dir / "config.yaml").unlink()
    arguments = ["--data", "a/b.jsonl", "--reward", "gsm8k", "-n", "8", "eval.data.size=5"]
    assert invoke(run_dir / "model", *arguments).exit_code == 0
    (config,) = evaluated
    assert (config.kind, config.model.path) == ("eval", str(run_dir / "model"))
    assert (config.eval.data.source, config.eval.data.path) == ("jsonl", "a/b.jsonl")
    assert (config.eval.data.size, config.eval.reward.name) == (5, "gsm8k")
    assert config.eval.samples == 8
    assert not config.eval.decoding.is_greedy


def test_model_of_a_run_on_pairs_is_measured_as_a_model_alone(
    run_dir: Path, evaluated: list[Any]
) -> None:
    (run_dir / "config.yaml").write_text("kind: dpo\n")
    assert invoke(run_dir, "--data", "chain_sum").exit_code == 0
    assert (evaluated[0].kind, evaluated[0].eval.data.task) == ("eval", "chain_sum")


def test_data_given_replaces_those_of_the_run(run_dir: Path, evaluated: list[Any]) -> None:
    assert invoke(run_dir, "--data", str(run_dir)).exit_code == 0
    assert evaluated[0].eval.data.source == "dataset"
    assert evaluated[0].eval.data.task is None


def test_file_of_another_kind_is_no_data(run_dir: Path) -> None:
    result = invoke(run_dir, "--data", "rows.csv")
    assert isinstance(result.exception, ConfigError)
    assert "rows.csv" in str(result.exception)


def test_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    result = invoke(tmp_path)
    assert isinstance(result.exception, ConfigError)
    assert "config.json" in str(result.exception)
