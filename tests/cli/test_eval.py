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
        return {"accuracy": 0.75}

    monkeypatch.setattr(tandem.trainers, "run_eval", run_eval, raising=False)
    return configs


def invoke(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def test_run_and_its_model_mean_the_same(run_dir: Path, evaluated: list[Any]) -> None:
    for target in (run_dir, run_dir / "model"):
        result = invoke(target, "run.seed=3")
        assert result.exit_code == 0, result.exception
        assert "0.7500" in result.output
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
    assert json.loads((tmp_path / "result.json").read_text()) == {"accuracy": 0.75}


def test_model_without_a_run_says_what_is_missing(run_dir: Path) -> None:
    (run_dir / "config.yaml").unlink()
    result = invoke(run_dir / "model")
    assert isinstance(result.exception, ConfigError)
    assert "--model" in str(result.exception)


def test_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    result = invoke(tmp_path)
    assert isinstance(result.exception, ConfigError)
    assert "config.json" in str(result.exception)
