"""Exactly once: twenty kills at named moments, and the reader that would find what went wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.audit_run import audit_after_kill, audit_finished

import tandem
from tandem.store import Moved, SqliteStore
from tests.store.episodes import S, stored

ROOT = Path(__file__).parents[2]


def test_twenty_kills_lose_and_double_nothing(tmp_path: Path) -> None:
    source = str(Path(tandem.__file__).resolve().parents[1])
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "benchmarks" / "kill_matrix.py"),
            *("--kills", "20", "--generator", "0", "--seed", "1", "--folder", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": source},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["kills"] == 20
    assert (result["lost"], result["doubled"], result["faults"]) == (0, 0, [])
    assert len(result["by_moment"]) == 13


# --- the reader itself ----------------------------------------------------------------------------


def finished_run(run_dir: Path, *, open_ids: tuple[int, ...] = (4,), position: int = 5) -> Path:
    """Two steps of two episodes; episode 4 is open, and one attempt of 2 was superseded."""
    store = SqliteStore(run_dir / "rollouts.sqlite")
    store.write([stored(key, key - 1) for key in (1, 2)])
    store.write([stored(3, 2, state=S.SUPERSEDED, reason="submitted again", closed_version=1)])
    store.write([stored(4, 2, attempt=1), stored(5, 3), stored(6, 4)])
    for keys, step in (((1, 2), 1), ((4, 5), 2)):
        store.write([Moved(keys, S.IN_TRAINING, version=step - 1, step=step)])
        store.write([Moved(keys, S.CONSUMED, version=step, step=step)])
    store.close()
    (run_dir / "config.yaml").write_text("store:\n  keep_steps: null\n")
    rollout = {"open_episodes": [[i, 0] for i in open_ids], "feed": {"epoch": 0}}
    rollout["feed"]["position"] = position  # type: ignore[call-overload]
    manifest = run_dir / "checkpoints" / "step_2" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"step": 2, "extra": {"rollout": rollout}}))
    record_training(run_dir, {1: [0, 1], 2: [2, 3]})
    return run_dir


def record_training(run_dir: Path, batches: dict[int, list[int]]) -> None:
    lines = [json.dumps({"step": step, "episodes": ids}) for step, ids in batches.items()]
    (run_dir / "trained.jsonl").write_text("\n".join(lines))


def test_the_reader_finds_nothing_in_a_sound_run(tmp_path: Path) -> None:
    run_dir = finished_run(tmp_path)
    assert audit_finished(run_dir, 2, num_steps=2).are_clean


def test_the_reader_finds_a_prompt_that_nobody_knows(tmp_path: Path) -> None:
    findings = audit_finished(finished_run(tmp_path, position=7), 2, num_steps=2)
    assert findings.lost == [5, 6]


def test_the_reader_misses_no_prompt_whose_end_retention_may_have_removed(tmp_path: Path) -> None:
    run_dir = finished_run(tmp_path, position=7)
    (run_dir / "config.yaml").write_text("store:\n  keep_steps: 3\n")
    assert audit_finished(run_dir, 2, num_steps=2).are_clean


def test_the_reader_finds_an_open_episode_that_was_trained(tmp_path: Path) -> None:
    findings = audit_after_kill(finished_run(tmp_path, open_ids=(3, 4)), 2)
    assert findings.doubled == [3]


def test_the_reader_finds_an_episode_that_was_trained_twice(tmp_path: Path) -> None:
    run_dir = finished_run(tmp_path)
    record_training(run_dir, {1: [0, 1], 2: [1, 3]})
    findings = audit_finished(run_dir, 2, num_steps=2)
    assert findings.doubled == [1]
    assert findings.lost == [2]
    assert "step 2" in findings.faults[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda store: store.write([stored(9, 3)]), "stored 2 times"),
        (lambda store: store.write([stored(9, state=S.STALE, closed_version=2)]), "without a rea"),
        (
            lambda store: store.write([Moved((6,), S.IN_TRAINING, version=1, step=2)]),
            "still in training",
        ),
    ],
    ids=["attempt twice", "no reason", "in training"],
)
def test_the_reader_finds_contradictions(
    tmp_path: Path, change: Callable[[Any], None], words: str
) -> None:
    run_dir = finished_run(tmp_path)
    store = SqliteStore(run_dir / "rollouts.sqlite")
    change(store)
    store.close()
    findings = audit_finished(run_dir, 2, num_steps=2)
    assert any(words in fault for fault in findings.faults), findings
