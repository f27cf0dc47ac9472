"""The scripts in ``examples/``, each run whole with tiny sizes."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tandem.config import load_config
from tandem.observe import read_summary
from tandem.trainers import run_rl
from tests.runs.conftest import metrics

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

SMALL = (
    "steps=2",
    "run.threads=1",
    "model.tiny.hidden_size=64",
    "model.tiny.num_layers=2",
    "model.tiny.intermediate_size=128",
    "warmup.steps=40",
    "warmup.train.warmup_steps=5",
    "warmup.train.lr=5e-3",
    "warmup.batch_size=32",
    "warmup.data.size=200",
    "data.size=50",
    "eval.data.size=8",
    "rollout.batch_size=4",
    "rollout.group_size=4",
    "rollout.max_staleness=0",
    "inference.mode=inprocess",
    "tracking.progress=false",
)


def run_example(name: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = EXAMPLES / name
    monkeypatch.setattr(sys, "argv", [str(path), *SMALL, f"run.output_dir={tmp_path}"])
    runpy.run_path(str(path), run_name="__main__")
    return tmp_path / run_name


def test_every_example_has_a_test():
    names = {path.name for path in EXAMPLES.glob("*.*") if path.suffix in (".py", ".yaml")}
    assert names == {
        "custom_reward.py",
        "rl_from_python.py",
        "second_attempt.yaml",
        "tool_agent.py",
        "tool_use.yaml",
    }


def test_rl_from_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run_dir = run_example("rl_from_python.py", "from-python", tmp_path, monkeypatch)
    summary = read_summary(run_dir)
    assert summary is not None
    printed = capsys.readouterr().out.split()
    assert printed[-1] == summary["model_dir"] == str(run_dir / "model")
    assert len(metrics(run_dir)) == 3


def test_custom_reward_and_workflow_make_the_training_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run_dir = run_example("custom_reward.py", "custom-reward", tmp_path, monkeypatch)
    rows = metrics(run_dir)[1:]
    assert len(rows) == 2
    # Partial credit: not what the task's own scorer gives a model that has barely been warmed up.
    assert all(0 < row["reward/mean"] < 1.1 for row in rows)


def test_letters_in_place_counts_from_the_left(monkeypatch: pytest.MonkeyPatch):
    score = runpy.run_path(str(EXAMPLES / "custom_reward.py"))["letters_in_place"]
    assert score("cat>", "tac", [], [], answer="tac", word="cat") == 1.0
    assert score("cat>", "tab", [], [], answer="tac") == pytest.approx(2 / 3)
    assert score("cat>", "tact", [], [], answer="tac") == 0.75
    assert score("cat>", "", [], [], answer="tac") == 0.0


def small_tool_task(folder: Path) -> list[str]:
    """Overrides for the two workflows of the tool task, with a smaller model and few steps."""
    data = folder / "data"
    return [
        f"run.output_dir={folder}",
        f"model.path={data}/model",
        f"warmup.data.path={data}/demonstrations.jsonl",
        f"data.path={data}/prompts.jsonl",
        "eval.data=null",
        "run.threads=1",
        "steps=2",
        "warmup.steps=20",
        "warmup.train.warmup_steps=2",
        "rollout.batch_size=2",
        "rollout.group_size=4",
        "rollout.max_staleness=0",
        "rollout.generation.max_new_tokens=16",
        "inference.mode=inprocess",
        "tracking.progress=false",
    ]


@pytest.mark.parametrize("workflow", ["agent", "tool_use"])
def test_both_workflows_of_the_tool_task_run(
    workflow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(EXAMPLES.parent)
    path = EXAMPLES / "tool_agent.py"
    arguments = [str(path), f"workflow={workflow}", *small_tool_task(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(str(path), run_name="__main__")
    rows = metrics(tmp_path / {"agent": "agent", "tool_use": "tool-use"}[workflow])
    assert len(rows) == 2
    assert all(0 <= row["reward/mean"] <= 1 for row in rows)
    # Token truth: trainer and sampler agree on every token of conversations, too.
    assert rows[0]["mismatch/same_version_max"] < 1e-4


def test_a_second_attempt_runs(tmp_path: Path):
    small = [item for item in SMALL if not item.startswith("rollout.")]
    config = load_config(
        EXAMPLES / "second_attempt.yaml",
        [*small, "rollout.batch_size=4", "rollout.group_size=4", f"run.output_dir={tmp_path}"],
    )
    run_rl(config)
    rows = metrics(tmp_path / "second-attempt")[1:]
    assert len(rows) == 2
    assert all(0 <= row["reward/mean"] <= 1 for row in rows)


@pytest.mark.long
def test_a_two_turn_tool_task_is_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By the workflow that runs the tool; by an agent: ``test_agents``."""
    monkeypatch.chdir(EXAMPLES.parent)
    path = EXAMPLES / "tool_agent.py"
    whole = [
        item
        for item in small_tool_task(tmp_path)
        if item.split("=")[0].endswith((".path", "run.output_dir", "eval.data"))
    ]
    monkeypatch.setattr(sys, "argv", [str(path), "workflow=tool_use", *whole])
    runpy.run_path(str(path), run_name="__main__")
    rows = metrics(tmp_path / "tool-use")
    before = sum(row["reward/mean"] for row in rows[:5]) / 5
    after = sum(row["reward/mean"] for row in rows[-10:]) / 10
    assert after > before + 0.15
