"""Runs that are killed or stopped, and go on."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from tandem.checkpoint import latest, save
from tandem.errors import CheckpointError, DataError, Preempted
from tandem.trainers import run_rl, run_sft
from tandem.trainers.run import StopSignal
from tandem.weights.transports.shared_memory import PREFIX, shared_root
from tests.runs.conftest import Bed, has_step, metrics
from tests.runs.launcher import Launcher, audit_batches

STOPPED = 75
KEPT = ("actor/loss", "actor/grad_norm", "sft/loss", "sft/grad_norm", "reward/mean")


def curve(run_dir: Path) -> list[dict[str, float]]:
    """What training computed at each step, without times."""
    return [
        {name: row[name] for name in ("step", *KEPT) if name in row} for row in metrics(run_dir)
    ]


def weights(model_dir: Path) -> dict[str, bytes]:
    return {
        name: tensor.numpy().tobytes()
        for name, tensor in load_file(model_dir / "model.safetensors").items()
    }


def assert_same_run(run_dir: Path, reference: Path, num_steps: int) -> None:
    assert curve(run_dir) == curve(reference)
    assert [row["step"] for row in metrics(run_dir)] == list(range(num_steps + 1))
    assert weights(run_dir / "model") == weights(reference / "model")


def test_killed_synchronous_run_resumes_bit_for_bit(bed: Bed, launcher: Launcher):
    options = ("steps=14", "checkpoint.every=4", "eval.every=5")
    run_rl(bed.config(*options, name="reference"))
    started = launcher.start(bed.folder / "log", *bed.arguments(*options))
    run_dir = bed.run_dir()
    assert started.signal_when(signal.SIGKILL, has_step(run_dir, 6)) == -signal.SIGKILL
    assert not (run_dir / "summary.json").exists()
    summary = run_rl(bed.config(*options), resume=True)
    assert summary["steps"] == 14
    assert_same_run(run_dir, bed.run_dir("reference"), 14)


def has_staging(run_dir: Path, step: int) -> Callable[[], bool]:
    """A checkpoint of this step or a later one is being written, or there already."""
    names = re.compile(r"(?:\.staging-)?step_(\d+)")

    def holds() -> bool:
        found = (names.match(path.name) for path in (run_dir / "checkpoints").glob("*"))
        return any(int(match[1]) >= step for match in found if match)

    return holds


def test_run_killed_while_a_thread_saves_resumes_bit_for_bit(bed: Bed, launcher: Launcher):
    options = ("steps=8", "checkpoint.every=2", "eval.every=5")
    run_rl(bed.config(*options, name="reference"))
    background = (*options, "checkpoint.background=true")
    started = launcher.start(bed.folder / "log", *bed.arguments(*background))
    condition = has_staging(bed.run_dir(), 4)
    assert started.signal_when(signal.SIGKILL, condition) == -signal.SIGKILL
    assert run_rl(bed.config(*background), resume=True)["steps"] == 8
    assert_same_run(bed.run_dir(), bed.run_dir("reference"), 8)


@pytest.mark.long
@pytest.mark.parametrize("background", ["true", "false"])
@pytest.mark.parametrize("seed", range(6))
def test_run_killed_at_any_moment_resumes_bit_for_bit(
    bed: Bed, launcher: Launcher, seed: int, background: str
):
    options = ("steps=10", "checkpoint.every=1", f"checkpoint.background={background}")
    reference = time.monotonic()
    run_rl(bed.config(*options, name="reference"))
    whole_s = time.monotonic() - reference
    started = launcher.start(bed.folder / "log", *bed.arguments(*options))
    started.wait_for(has_staging(bed.run_dir(), 0))
    moment = time.monotonic() + random.Random(seed).uniform(0, 0.8) * whole_s
    started.kill_at(moment)
    assert run_rl(bed.config(*options), resume=True)["steps"] == 10
    assert_same_run(bed.run_dir(), bed.run_dir("reference"), 10)


def test_run_stopped_while_a_thread_saves_has_saved(bed: Bed, launcher: Launcher):
    options = ("steps=14", "checkpoint.every=0", "checkpoint.background=true")
    started = launcher.start(bed.folder / "log", *bed.arguments(*options))
    run_dir = bed.run_dir()
    assert started.signal_when(signal.SIGTERM, has_step(run_dir, 3)) == STOPPED
    last = metrics(run_dir)[-1]["step"]
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["step_0", f"step_{last}"]
    checkpoint = latest(run_dir)
    assert checkpoint is not None
    assert checkpoint.step == last


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_stop_asked_for_after_a_step_border_has_saved_at_the_next(
    bed: Bed, sft_bed: Bed, monkeypatch: pytest.MonkeyPatch, kind: str
):
    answers = chain([None], repeat("SIGTERM"))
    asked = property(lambda stop: next(answers), lambda stop, value: None)
    monkeypatch.setattr(StopSignal, "requested", asked, raising=False)
    used, train = (bed, run_rl) if kind == "rl" else (sft_bed, run_sft)
    with pytest.raises(Preempted, match="the state is saved"):
        train(used.config("steps=5" if kind == "rl" else "sft.epochs=2"))
    assert [row["step"] for row in metrics(used.run_dir())] == [0, 1, 2]
    checkpoint = latest(used.run_dir())
    assert checkpoint is not None
    assert checkpoint.step == 2


def test_supervised_run_with_a_saving_thread_ends_like_one_without(sft_bed: Bed):
    summary = run_sft(sft_bed.config("checkpoint.background=true"))
    run_sft(sft_bed.config(name="reference"))
    assert_same_run(sft_bed.run_dir(), sft_bed.run_dir("reference"), 40)
    checkpoint = latest(sft_bed.run_dir())
    assert checkpoint is not None
    assert checkpoint.step == summary["steps"] == 40


def test_failure_of_the_saving_thread_ends_the_run_without_a_summary(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
):
    original = save.write_manifest

    def write_manifest(directory: Path, *, step: int, **options: Any) -> None:
        if step == 3:
            raise OSError(28, "No space left on device")
        original(directory, step=step, **options)

    monkeypatch.setattr(save, "write_manifest", write_manifest)
    with pytest.raises(CheckpointError, match=r"step_3.*No space left"):
        run_rl(bed.config("steps=3", "checkpoint.background=true"))
    assert not (bed.run_dir() / "summary.json").exists()
    checkpoint = latest(bed.run_dir())
    assert checkpoint is not None
    assert checkpoint.step == 2


def test_killed_supervised_run_resumes_bit_for_bit(sft_bed: Bed, launcher: Launcher):
    reference = run_sft(sft_bed.config("eval.every=15", name="reference"))
    started = launcher.start(sft_bed.folder / "log", *sft_bed.arguments("eval.every=15"))
    run_dir = sft_bed.run_dir()
    assert started.signal_when(signal.SIGKILL, has_step(run_dir, 8)) == -signal.SIGKILL
    summary = run_sft(sft_bed.config("eval.every=15"), resume=True)
    assert summary["accuracy_after"] == reference["accuracy_after"]
    assert summary["accuracy_before"] == reference["accuracy_before"]
    assert_same_run(run_dir, sft_bed.run_dir("reference"), 40)


def test_supervised_run_killed_before_its_first_checkpoint_resumes(
    sft_bed: Bed, launcher: Launcher
):
    options = ("sft.checkpoint_every=0", "sft.steps=30")
    reference = run_sft(sft_bed.config(*options, name="reference"))
    started = launcher.start(sft_bed.folder / "log", *sft_bed.arguments(*options))
    assert started.signal_when(signal.SIGKILL, has_step(sft_bed.run_dir(), 2)) == -signal.SIGKILL
    summary = run_sft(sft_bed.config(*options), resume=True)
    assert summary["accuracy_before"] == reference["accuracy_before"]
    assert_same_run(sft_bed.run_dir(), sft_bed.run_dir("reference"), 30)


def test_run_killed_in_its_warmup_resumes_bit_for_bit(cold_bed: Bed, launcher: Launcher):
    run_rl(cold_bed.config("steps=2", name="reference"))
    started = launcher.start(cold_bed.folder / "log", *cold_bed.arguments("steps=2"))
    warmup = cold_bed.run_dir() / "warmup"
    assert started.signal_when(signal.SIGKILL, has_step(warmup, 8)) == -signal.SIGKILL
    assert metrics(cold_bed.run_dir()) == []
    run_rl(cold_bed.config("steps=2"), resume=True)
    assert curve(warmup) == curve(cold_bed.run_dir("reference") / "warmup")
    assert_same_run(cold_bed.run_dir(), cold_bed.run_dir("reference"), 2)


def test_run_stopped_in_its_warmup_leaves_a_run_that_resumes(cold_bed: Bed, launcher: Launcher):
    rare = ("steps=1", "warmup.checkpoint_every=0")
    started = launcher.start(cold_bed.folder / "log", *cold_bed.arguments(*rare))
    warmup = cold_bed.run_dir() / "warmup"
    assert started.signal_when(signal.SIGTERM, has_step(warmup, 3)) == STOPPED
    (saved,) = (warmup / "checkpoints").iterdir()
    assert saved.name == f"step_{metrics(warmup)[-1]['step']}"
    run_rl(cold_bed.config(*rare), resume=True)
    assert [row["step"] for row in metrics(warmup)] == list(range(1, 61))


def test_stopped_run_saves_its_state_and_resumes(bed: Bed, launcher: Launcher):
    options = ("steps=14", "checkpoint.every=0")
    started = launcher.start(bed.folder / "log", *bed.arguments(*options))
    run_dir = bed.run_dir()
    assert started.signal_when(signal.SIGTERM, has_step(run_dir, 3)) == STOPPED
    assert "--resume" in started.log.read_text()
    last = metrics(run_dir)[-1]["step"]
    assert 3 <= last < 14
    assert (run_dir / "checkpoints" / f"step_{last}").is_dir()
    run_rl(bed.config(*options), resume=True)
    run_rl(bed.config(*options, name="reference"))
    assert_same_run(run_dir, bed.run_dir("reference"), 14)


ASYNCHRONOUS = (
    "inference.mode=process",
    "rollout.max_staleness=1",
    "checkpoint.every=3",
    "steps=12",
)


def test_killed_asynchronous_run_trains_every_episode_once(
    bed: Bed, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
):
    audit = bed.folder / "audit.jsonl"
    started = launcher.start(bed.folder / "log", *bed.arguments(*ASYNCHRONOUS), audit=audit)
    started.wait_for(has_step(bed.run_dir(), 1))
    generator = psutil.Process(started.pid).children()
    assert started.signal_when(signal.SIGKILL, lambda: len(lines(audit)) >= 6) == -signal.SIGKILL
    assert psutil.wait_procs(generator, timeout=60)[1] == []
    before = lines(audit)

    audit.unlink()
    from tandem.rollout.composed import ComposedInferenceEngine

    monkeypatch.setattr(
        ComposedInferenceEngine, "prepare_batch", ComposedInferenceEngine.prepare_batch
    )
    audit_batches(audit)
    summary = run_rl(bed.config(*ASYNCHRONOUS), resume=True)
    assert not list(shared_root().glob(f"{PREFIX}policy*-{os.getpid()}-*"))
    after = lines(audit)
    assert [row["step"] for row in metrics(bed.run_dir())] == list(range(13))
    assert summary["max_staleness_seen"] <= 1
    # Batch number n is made into version n + 1: what the checkpoint did not have comes again.
    resumed_at = after[0]["version"]
    assert resumed_at in (3, 6)
    trained = [line for line in before if line["version"] < resumed_at] + after
    assert [line["version"] for line in trained] == list(range(12))
    ids = [episode for line in trained for episode in line["episodes"]]
    assert len(ids) == len(set(ids)) == 12 * 4


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_killed_generator_ends_the_run_with_an_error_that_names_it(bed: Bed, launcher: Launcher):
    started = launcher.start(bed.folder / "log", *bed.arguments(*ASYNCHRONOUS))
    run_dir = bed.run_dir()
    started.wait_for(has_step(run_dir, 4))
    (generator,) = psutil.Process(started.pid).children()
    os.kill(generator.pid, signal.SIGKILL)
    assert started.wait() == 4
    last = started.log.read_text().splitlines()[-1]
    assert last.startswith("error: ")
    assert "the child engine ended with exit code -9" in last
    assert run_rl(bed.config(*ASYNCHRONOUS), resume=True)["steps"] == 12
    assert [row["step"] for row in metrics(run_dir)] == list(range(13))


def test_resuming_a_finished_run_changes_nothing(bed: Bed):
    first = run_rl(bed.config())
    curve_before, weights_before = curve(bed.run_dir()), weights(bed.run_dir() / "model")
    again = run_rl(bed.config(), resume=True)
    assert curve(bed.run_dir()) == curve_before
    assert weights(bed.run_dir() / "model") == weights_before
    for name in ("accuracy_before", "accuracy_after", "steps", "max_staleness_seen"):
        assert again[name] == first[name], name


def test_a_run_whose_prompts_changed_is_not_resumed(bed: Bed):
    path = bed.folder / "train.jsonl"
    shutil.copy(bed.settings["data"]["path"], path)
    run_rl(bed.config("steps=1", f"data.path={path}"))
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    with pytest.raises(DataError, match="digest"):
        run_rl(bed.config("steps=2", f"data.path={path}"), resume=True)


def test_a_run_can_be_prolonged(bed: Bed):
    run_rl(bed.config("steps=2"))
    run_rl(bed.config("steps=5"), resume=True)
    run_rl(bed.config("steps=5", name="reference"))
    assert_same_run(bed.run_dir(), bed.run_dir("reference"), 5)


def test_a_resumed_run_samples_with_the_weights_of_its_checkpoint(bed: Bed):
    run_rl(bed.config("steps=7", "train.lr=1e-2"))
    start = weights(bed.run_dir() / "model")
    run_rl(bed.config("steps=8", "train.lr=1e-2"), resume=True)
    assert weights(bed.run_dir() / "model") != start
    (row,) = [row for row in metrics(bed.run_dir()) if row["step"] == 8]
    assert row["mismatch/same_version_max"] < 1e-4


def test_a_resumed_run_may_begin_its_schedule_anew(bed: Bed):
    schedule = ("train.schedule=linear", "train.warmup_steps=4")
    run_rl(bed.config("steps=2", *schedule))
    run_rl(bed.config("steps=4", *schedule, "train.restart_schedule=true"), resume=True)
    rates = [row["actor/lr"] for row in metrics(bed.run_dir()) if "actor/lr" in row]
    assert rates[2:] == pytest.approx(rates[:2])
    assert rates[1] > rates[0]


def test_so_may_a_supervised_one(sft_bed: Bed):
    schedule = ("sft.train.schedule=linear", "sft.train.warmup_steps=8")
    run_sft(sft_bed.config("sft.steps=4", *schedule))
    restarted = (*schedule, "sft.train.restart_schedule=true")
    run_sft(sft_bed.config("sft.steps=7", *restarted), resume=True)
    rates = [row["sft/lr"] for row in metrics(sft_bed.run_dir()) if "sft/lr" in row]
    assert rates[4:] == pytest.approx(rates[:3])
    assert rates[1] > rates[0]
