"""``tandem status`` tells where a run is from its directory alone."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from tandem.cli import app
from tandem.errors import ConfigError
from tandem.observe import MetricsLogger, write_summary


def test_running_and_finished_runs(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("kind: rl\n")
    for step in (0, 10, 9):
        (tmp_path / "checkpoints" / f"step_{step}").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_12.superseded").mkdir()
    with MetricsLogger(tmp_path) as logger:
        logger.log(11, {"reward/mean": 0.25})
    result = CliRunner().invoke(app, ["status", str(tmp_path)])
    assert result.exit_code == 0
    assert "not finished" in result.output
    assert "checkpoints: step_0, step_9, step_10" in result.output.replace("\n", " ")
    assert "last step: 11" in result.output
    assert "reward/mean" in result.output
    write_summary(tmp_path, {"accuracy_after": 0.875})
    result = CliRunner().invoke(app, ["status", str(tmp_path)])
    assert "accuracy_after: 0.875" in result.output


def test_other_directory_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["status", str(tmp_path)])
    assert isinstance(result.exception, ConfigError)
