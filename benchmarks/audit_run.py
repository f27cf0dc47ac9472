"""An independent reader of a run: its store with plain sqlite3, its manifests as plain JSON.

Nothing of Tandem is imported: what this finds does not depend on the code that is under test.
``trained.jsonl``, written by the kill tests in the training loop itself, says what was trained.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


@dataclass
class Findings:
    """``lost`` and ``doubled`` episodes, and everything else that contradicts the documentation."""

    lost: list[int] = field(default_factory=list)
    doubled: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def are_clean(self) -> bool:
        return not (self.lost or self.doubled or self.faults)


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    db = sqlite3.connect(f"file:{run_dir / 'rollouts.sqlite'}?mode=ro", uri=True)
    db.row_factory = sqlite3.Row
    try:
        (verdict,) = db.execute("PRAGMA integrity_check").fetchone()
        assert verdict == "ok", verdict
        return [dict(row) for row in db.execute("SELECT * FROM episodes ORDER BY key")]
    finally:
        db.close()


def newest_manifest(run_dir: Path) -> dict[str, Any] | None:
    steps = [
        int(path.parent.name.removeprefix("step_"))
        for path in run_dir.glob("checkpoints/step_*/manifest.json")
        if path.parent.name.removeprefix("step_").isdigit()
    ]
    if not steps:
        return None
    path = run_dir / "checkpoints" / f"step_{max(steps)}" / "manifest.json"
    manifest: dict[str, Any] = json.loads(path.read_text())
    return manifest


def trained_of(run_dir: Path) -> dict[int, list[int]]:
    """Episodes by step in the surviving history: a later record of a step replaces an earlier."""
    path = run_dir / "trained.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {record["step"]: record["episodes"] for record in map(json.loads, lines)}


def audit_after_kill(run_dir: Path, batch_size: int) -> Findings:
    """What must hold at every moment: the newest manifest and the store belong together."""
    findings = Findings()
    manifest = newest_manifest(run_dir)
    if manifest is None:
        return findings
    rows, step = rows_of(run_dir), manifest["step"]
    _check_attempts(rows, findings)
    consumed = [r for r in rows if r["state"] == "consumed" and r["step"] <= step]
    open_ids = {item[0] for item in manifest["extra"]["rollout"]["open_episodes"]}
    findings.doubled += sorted(open_ids & {row["episode_id"] for row in consumed})
    _check_batches(consumed, batch_size, findings)
    if step > 0 and max((row["step"] for row in consumed), default=0) != step:
        findings.faults.append(f"the checkpoint is of step {step}, whose batch is not consumed")
    return findings


def audit_finished(run_dir: Path, batch_size: int, *, num_steps: int) -> Findings:
    """What must hold when the run has reached its last step."""
    findings = audit_after_kill(run_dir, batch_size)
    manifest = newest_manifest(run_dir)
    assert manifest is not None
    assert manifest["step"] == num_steps
    rows, trained = rows_of(run_dir), trained_of(run_dir)
    if sorted(trained) != list(range(1, num_steps + 1)):
        findings.faults.append(f"steps that were trained: {sorted(trained)}")
    times = Counter(episode for episodes in trained.values() for episode in episodes)
    findings.doubled += [episode for episode, number in times.items() if number > 1]
    stored: dict[int, set[int]] = {}
    for row in rows:
        if row["state"] == "consumed":
            stored.setdefault(row["step"], set()).add(row["episode_id"])
        if row["state"] == "in_training":
            findings.faults.append(f"attempt {row['key']} is still in training")
    for step, episodes in stored.items():
        if episodes != set(trained.get(step, ())):
            findings.faults.append(
                f"step {step}: the store has {sorted(episodes)}, trained were {trained.get(step)}"
            )
    if not _is_pruned(run_dir):
        findings.lost += _lost(rows, manifest, set(times))
    return findings


def _is_pruned(run_dir: Path) -> bool:
    """Whether old attempts may have been removed, the reasons of failed ones among them."""
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    return config["store"]["keep_steps"] is not None


def _lost(rows: list[dict[str, Any]], manifest: dict[str, Any], trained: set[int]) -> list[int]:
    """Prompts that were handed out and are neither trained, nor dropped for a reason, nor open."""
    rollout = manifest["extra"]["rollout"]
    assert rollout["feed"]["epoch"] == 0
    dropped = {r["episode_id"] for r in rows if r["state"] in ("rejected", "failed", "stale")}
    open_ids = {item[0] for item in rollout["open_episodes"]}
    known = trained | dropped | open_ids
    return [i for i in range(rollout["feed"]["position"]) if i not in known]


def _check_attempts(rows: list[dict[str, Any]], findings: Findings) -> None:
    pairs = Counter((row["episode_id"], row["attempt"]) for row in rows)
    findings.faults += [f"{pair} is stored {n} times" for pair, n in pairs.items() if n > 1]
    for row in rows:
        is_trained = row["step"] is not None and row["closed_version"] is not None
        if (row["state"] == "consumed") != is_trained:
            findings.faults.append(f"attempt {row['key']}: {row['state']} with step {row['step']}")
        if row["state"] not in ("consumed", "in_training", "ready") and not row["reason"]:
            findings.faults.append(f"attempt {row['key']} is {row['state']} without a reason")


def _check_batches(consumed: list[dict[str, Any]], batch_size: int, findings: Findings) -> None:
    by_id = Counter(row["episode_id"] for row in consumed)
    findings.doubled += [episode for episode, number in by_id.items() if number > 1]
    by_step = Counter(row["step"] for row in consumed)
    if by_step and sorted(by_step) != list(range(min(by_step), max(by_step) + 1)):
        findings.faults.append(f"steps in the store have gaps: {sorted(by_step)}")
    findings.faults += [
        f"step {step} has {number} episodes"
        for step, number in by_step.items()
        if number != batch_size
    ]
