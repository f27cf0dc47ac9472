"""The end of a run: summary.json and the last screen."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from tandem.observe import RunReport, Sample, final_screen, read_summary, write_summary


def test_summary_is_written_in_one_piece_and_reads_back(tmp_path: Path) -> None:
    assert read_summary(tmp_path) is None
    path = write_summary(tmp_path, {"accuracy_after": 0.5, "model_dir": tmp_path / "model"})
    assert path == tmp_path / "summary.json"
    assert read_summary(tmp_path) == {
        "accuracy_after": 0.5,
        "model_dir": str(tmp_path / "model"),
    }
    assert [item.name for item in tmp_path.iterdir()] == ["summary.json"]


def test_what_json_lacks_becomes_null(tmp_path: Path) -> None:
    path = write_summary(tmp_path, {"a": math.nan, "b": [math.inf, 1]})
    assert json.loads(path.read_text()) == {"a": None, "b": [None, 1]}


def test_failed_write_leaves_the_old_summary(tmp_path: Path) -> None:
    write_summary(tmp_path, {"a": 1})
    with pytest.raises(TypeError):
        write_summary(tmp_path, {"a": object()})
    assert read_summary(tmp_path) == {"a": 1}


def rendered(report: RunReport) -> str:
    file = io.StringIO()
    final_screen(report, Console(file=file, width=100))
    return file.getvalue()


def test_screen_tells_what_happened_and_what_to_type_next(tmp_path: Path) -> None:
    text = rendered(
        RunReport(
            title="quickstart",
            run_dir=tmp_path,
            steps=75,
            wall_s=123.4,
            model_dir=tmp_path / "model",
            before=0.41,
            after=0.94,
            num_problems=200,
            rewards=[0.1, 0.5, 0.9],
            samples_before=[Sample("1 + 2 =", "[4]", False)],
            samples_after=[Sample("1 + 2 =", "[3]", True)],
        )
    )
    assert "accuracy of 200 held-out problems: 0.410 before, 0.940 after" in text
    assert "✗ [4]" in text
    assert "✓ [3]" in text
    assert "mean reward over 3 steps" in text
    assert f"tandem generate {tmp_path / 'model'} --prompt '1 + 2 ='" in text
    assert f"tandem eval {tmp_path}" in text


@pytest.mark.parametrize(
    ("idle", "line"),
    [
        (0.034, "the trainer waited for rollouts 12%, the generator had nothing to do 3%"),
        (None, "the trainer waited for rollouts 12%"),
    ],
)
def test_screen_says_who_had_nothing_to_do(tmp_path: Path, idle: float | None, line: str) -> None:
    text = rendered(
        RunReport("run", tmp_path, steps=3, wall_s=2.0, trainer_wait=0.117, generator_idle=idle)
    )
    assert f"of their time {line} " in text
    assert ("generator" in text) == (idle is not None)


def test_screen_of_a_run_without_evaluation_says_only_what_is_known(tmp_path: Path) -> None:
    report = RunReport(
        title="sft", run_dir=tmp_path, steps=3, wall_s=2.0, model_dir=tmp_path / "model"
    )
    text = rendered(report)
    assert "tandem eval" not in text
    assert "3 steps in 2 s" in text
    assert "before" not in text
    assert "waited" not in text
    assert f"tandem status {tmp_path}" in text
