"""metrics.jsonl: one line a step, no value rather than NaN, nothing twice after a resume."""

from __future__ import annotations

import json
import logging
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.errors import ConfigError, DataError
from tandem.observe import MetricsLogger, mean_metrics, nan_mean, read_metrics

NAN = math.nan


def lines(run_dir: Path) -> list[dict[str, Any]]:
    text = (run_dir / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def record(run_dir: Path, steps: range) -> None:
    with MetricsLogger(run_dir) as logger:
        for step in steps:
            logger.log(step, {"loss": step / 10})


def test_each_step_is_one_object_with_its_time(tmp_path: Path) -> None:
    before = time.time()
    with MetricsLogger(tmp_path) as logger:
        logger.log(0, {"a": 1, "b": torch.tensor(0.25)})
        logger.log(5, {"a": 2.5})
    first, second = lines(tmp_path)
    assert before <= first.pop("time") <= second.pop("time") <= time.time()
    assert (first, second) == ({"step": 0, "a": 1, "b": 0.25}, {"step": 5, "a": 2.5})


def test_a_line_is_on_disk_before_the_next_step(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path) as logger:
        logger.log(1, {"a": 1.0})
        assert [row["step"] for row in lines(tmp_path)] == [1]


def test_nan_and_none_are_absent(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path) as logger:
        logger.log(1, {"a": NAN, "b": None, "c": 0.0, "d": torch.tensor(NAN)})
    (row,) = lines(tmp_path)
    assert row.keys() == {"step", "time", "c"}


def test_infinite_value_is_absent_and_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), MetricsLogger(tmp_path) as logger:
        logger.log(1, {"a": math.inf, "b": 1.0})
        logger.log(2, {"a": -math.inf})
    assert [sorted(row.keys() - {"time"}) for row in lines(tmp_path)] == [["b", "step"], ["step"]]
    assert [record.getMessage() for record in caplog.records] == [
        "metric 'a' is inf; infinite values are not recorded"
    ]


def test_step_must_grow(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path) as logger:
        logger.log(3, {})
        with pytest.raises(ValueError, match="step: got 3, allowed: > 3"):
            logger.log(3, {})


def test_resume_cuts_off_what_will_be_written_again(tmp_path: Path) -> None:
    record(tmp_path, range(1, 8))
    with MetricsLogger(tmp_path, resume_step=5) as logger:
        logger.log(5, {"loss": -1.0})
    assert [(row["step"], row["loss"]) for row in lines(tmp_path)] == [
        (1, 0.1),
        (2, 0.2),
        (3, 0.3),
        (4, 0.4),
        (5, -1.0),
    ]


def test_resume_drops_the_line_that_a_killed_process_left_torn(tmp_path: Path) -> None:
    record(tmp_path, range(1, 3))
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 3, "ti')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    with MetricsLogger(tmp_path, resume_step=3) as logger:
        logger.log(3, {})
    assert [row["step"] for row in lines(tmp_path)] == [1, 2, 3]


def test_damage_before_the_end_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(DataError, match="line 2"):
        MetricsLogger(tmp_path, resume_step=2)


def test_fresh_start_never_overwrites_a_run(tmp_path: Path) -> None:
    record(tmp_path, range(1, 3))
    with pytest.raises(ConfigError, match="--resume"):
        MetricsLogger(tmp_path)
    assert len(lines(tmp_path)) == 2


def test_resume_before_the_first_step_starts_empty(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path, resume_step=0) as logger:
        logger.log(0, {"a": 1.0})
    assert [row["step"] for row in lines(tmp_path)] == [0]


def test_nan_mean_skips_what_is_not_there() -> None:
    assert nan_mean([0.4, NAN, 0.9, NAN]) == pytest.approx(0.65, abs=1e-15)
    assert nan_mean([None, 2.0]) == 2.0
    assert nan_mean([]) is None
    assert nan_mean([NAN]) is None


def test_mean_metrics_has_no_entry_without_a_value() -> None:
    rows = [{"a": 0.4, "b": NAN}, {"a": NAN}, {"a": 0.9, "c": 3.0}]
    assert mean_metrics(rows) == {"a": pytest.approx(0.65, abs=1e-15), "c": 3.0}
    assert mean_metrics([]) == {}
