"""Trackers get what the record gets; a missing package names the extra to install."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tandem.errors import ConfigError
from tandem.observe import MetricsLogger
from tandem.observe.trackers import run_id


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard"])
def test_missing_package_names_the_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"pip install 'tandem-rl\[{name}\]'"):
        MetricsLogger(tmp_path, (name,))


def test_unknown_tracker_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got 'mlflow', allowed: tensorboard, trackio, wandb"):
        MetricsLogger(tmp_path, ("mlflow",))


@pytest.mark.skipif(not importlib.util.find_spec("tensorboard"), reason="needs tensorboard")
def test_tensorboard_holds_the_logged_values(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsLogger(tmp_path, ("tensorboard",)) as logger:
        logger.log(1, {"reward/mean": 0.25, "skipped": None})
        logger.log(2, {"reward/mean": 0.5})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    assert [(item.step, item.value) for item in events.Scalars("reward/mean")] == [
        (1, 0.25),
        (2, 0.5),
    ]


class FakeRun:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.finished = False

    def log(self, values: dict[str, float], step: int) -> None:
        self.rows.append((step, values))

    def finish(self) -> None:
        self.finished = True


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_run_objects_get_finite_values_and_are_finished(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, started = FakeRun(), {}

    def init(**kwargs: Any) -> FakeRun:
        started.update(kwargs)
        return run

    module = ModuleType(name)
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    with MetricsLogger(tmp_path, (name,), "project", "name") as logger:
        logger.log(4, {"a": 1.0, "b": float("nan")})
    assert (started["project"], started["name"]) == ("project", "name")
    assert run.rows == [(4, {"a": 1.0})]
    assert run.finished


def test_tracker_identity_is_kept_by_a_resume_and_renewed_by_a_fresh_start(tmp_path: Path) -> None:
    first = run_id(tmp_path, None)
    assert run_id(tmp_path, 5) == first
    assert run_id(tmp_path, None) != first
