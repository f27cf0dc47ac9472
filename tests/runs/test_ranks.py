"""Whole runs on two ranks: the same numbers as on one, kills and signals, other world sizes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import tandem
from tandem.trainers import run_dpo, run_reward, run_rl, run_sft
from tests.runs.conftest import Bed, Warmed, has_step, metrics
from tests.runs.launcher import Launcher, Started
from tests.runs.test_pairs import dpo_bed, pair_files, reward_bed
from tests.runs.test_resume import STOPPED, assert_same_run

__all__ = ["dpo_bed", "pair_files", "reward_bed"]

LOST = 4
SHARED = ("train.backend=fsdp", "train.device=cpu")
QUIET = ("eval.data=null", "checkpoint.export_model=false")


def start(
    launcher: Launcher, bed: Bed, *options: str, name: str = "run", audit: Path | None = None
) -> list[Started]:
    """The run on two ranks; each one's output is in a file of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [
        launcher.start(
            bed.folder / f"{name}.log.{rank}",
            *bed.arguments(*options, name=name),
            audit=audit,
            environment={
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_PORT": str(port),
            },
        )
        for rank in range(2)
    ]


def finish(ranks: Sequence[Started]) -> None:
    codes = [rank.wait() for rank in ranks]
    assert codes == [0, 0], "\n".join(rank.log.read_text() for rank in ranks)


def steps_of(bed: Bed, name: str) -> list[dict[str, float]]:
    """What each step computed, without times and without the cut into micro-batches."""
    varying = ("timing_s/", "perf/", "time", "actor/num_micro", "critic/num_micro")
    return [
        {key: value for key, value in row.items() if not key.startswith(varying)}
        for row in metrics(bed.run_dir(name))
    ]


def assert_same_numbers(bed: Bed, name: str, expected: str, num_steps: int) -> None:
    found, wanted = steps_of(bed, name), steps_of(bed, expected)
    assert [row["step"] for row in found] == [row["step"] for row in wanted]
    assert found[-1]["step"] == num_steps
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert ours[key] == pytest.approx(value, rel=1e-4, abs=1e-5), (ours["step"], key)


@pytest.mark.parametrize(
    "options",
    [
        (),
        (
            "algorithm.advantage=gae",
            "algorithm.kl_coef=0.05",
            "algorithm.minibatches=2",
            "critic.train.lr=3e-3",
            "critic.train.backend=fsdp",
            "rollout.batch_size=4",
        ),
        pytest.param(
            (
                "algorithm.advantage=none",
                "teacher.path=MODEL",
                "teacher.backend=fsdp",
                "teacher.top_k=4",
                "model.lora.rank=4",
            ),
            marks=pytest.mark.long,
        ),
        pytest.param(
            ("algorithm.kl_coef=0.05", "model.lora.rank=4", "algorithm.epochs=2"),
            marks=pytest.mark.long,
        ),
    ],
    ids=["grpo", "ppo with critic and reference", "distillation", "lora"],
)
def test_two_ranks_compute_what_one_does(
    bed: Bed, warmed: Warmed, launcher: Launcher, options: tuple[str, ...]
):
    options = tuple(option.replace("MODEL", str(warmed.model)) for option in options)
    ranks = start(launcher, bed, "steps=3", *SHARED, *options)
    alone = [option for option in options if not option.endswith("backend=fsdp")]
    run_rl(bed.config("steps=3", *alone, name="alone"))
    finish(ranks)
    assert_same_numbers(bed, "run", "alone", 3)
    summaries = [
        json.loads((bed.run_dir(n) / "summary.json").read_text()) for n in ("run", "alone")
    ]
    assert summaries[0]["accuracy_after"] == pytest.approx(summaries[1]["accuracy_after"], abs=0.05)


def test_two_ranks_learn_beside_a_generator_in_a_process_of_its_own(bed: Bed, launcher: Launcher):
    """The options of ``test_learning``, where one process learns this."""
    options = ("steps=24", "rollout.batch_size=8", "rollout.group_size=8", "checkpoint.every=0")
    process = ("rollout.max_staleness=1", "inference.mode=process")
    finish(start(launcher, bed, *options, *process, *SHARED))
    summary = json.loads((bed.run_dir() / "summary.json").read_text())
    assert summary["accuracy_after"] >= summary["accuracy_before"] + 0.2
    assert summary["max_staleness_seen"] == 1


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_run_which_resumes_bit_for_bit(
    bed: Bed, launcher: Launcher, victim: int
):
    options = ("steps=6", "checkpoint.every=2", *SHARED)
    reference = start(launcher, bed, *options, name="reference")
    ranks = start(launcher, bed, *options)
    ranks[victim].signal_when(signal.SIGKILL, has_step(bed.run_dir(), 3))
    survivor = ranks[1 - victim]
    assert survivor.wait() == LOST, survivor.log.read_text()
    assert "has lost another rank" in survivor.log.read_text()
    finish(reference)
    finish(start(launcher, bed, *options, "--resume"))
    assert_same_run(bed.run_dir(), bed.run_dir("reference"), 6)


@pytest.mark.parametrize("told", [0, 1], ids=["first rank", "other rank"])
def test_a_stopped_run_goes_on_with_another_number_of_ranks(
    bed: Bed, launcher: Launcher, told: int
):
    options = ("steps=6", "checkpoint.every=0")
    ranks = start(launcher, bed, *options, *SHARED)
    assert ranks[told].signal_when(signal.SIGTERM, has_step(bed.run_dir(), 2)) == STOPPED
    assert ranks[1 - told].wait() == STOPPED
    stopped = metrics(bed.run_dir())[-1]["step"]
    assert (bed.run_dir() / "checkpoints" / f"step_{stopped}").is_dir()
    run_rl(bed.config(*options), resume=True)
    run_rl(bed.config(*options, name="alone"))
    assert_same_numbers(bed, "run", "alone", 6)


def test_a_mistake_is_said_by_all_ranks_with_one_exit_code(bed: Bed, launcher: Launcher):
    ranks = start(launcher, bed, *SHARED, "data.path=/nowhere.jsonl")
    assert {rank.wait() for rank in ranks} == {3}
    assert all("/nowhere.jsonl" in rank.log.read_text() for rank in ranks)


# --- supervised trainers --------------------------------------------------------------------------

SFT = ("sft.batch_size=100", "sft.checkpoint_every=0", *QUIET)
SFT_SHARED = ("sft.train.backend=fsdp", "sft.train.device=cpu")


def rows_of(audit: Path, num_ranks: int) -> list[list[list[int]]]:
    """The rows of every optimizer step, whoever trained them, sorted."""
    files = [audit.with_name(f"{audit.name}.{rank}") for rank in range(num_ranks)]
    by_rank = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    assert num_ranks == 1 or all(part for parts in by_rank for part in parts)
    return [sorted(row for part in parts for row in part) for parts in zip(*by_rank, strict=True)]


@pytest.mark.parametrize("before", [1, 2])
def test_no_example_is_skipped_or_repeated_at_another_world_size(
    sft_bed: Bed, launcher: Launcher, before: int
):
    """Batches of 100 of the 544 demonstrations: the sixth step ends an epoch."""
    bed, audits = sft_bed, sft_bed.folder

    def run(num_ranks: int, *options: str, name: str = "run", audit: str) -> None:
        if num_ranks == 2:
            finish(start(launcher, bed, *options, *SFT_SHARED, name=name, audit=audits / audit))
            return
        arguments = bed.arguments(*options, name=name)
        log = audits / f"{audit}.log"
        assert launcher.start(log, *arguments, audit=audits / audit).wait() == 0, log.read_text()

    run(1, *SFT, "sft.steps=7", name="alone", audit="alone")
    run(before, *SFT, "sft.steps=4", audit="first")
    run(3 - before, *SFT, "sft.steps=7", "--resume", audit="second")
    expected = rows_of(audits / "alone", 1)
    assert [len(rows) for rows in expected] == [100] * 5 + [44, 100]
    found = rows_of(audits / "first", before) + rows_of(audits / "second", 3 - before)
    assert found == expected


@pytest.mark.parametrize(
    "options",
    [
        "dpo",
        "reward",
        pytest.param("kto", marks=pytest.mark.long),
        pytest.param("precompute", marks=pytest.mark.long),
    ],
)
def test_two_ranks_learn_preferences_as_one_does(
    request: pytest.FixtureRequest, launcher: Launcher, options: str
):
    kind = "reward" if options == "reward" else "dpo"
    bed: Bed = request.getfixturevalue(f"{kind}_bed")
    common = [f"{kind}.steps=4", "checkpoint.export_model=false"]
    common += {"kto": ["dpo.loss=kto"], "precompute": ["dpo.reference=precompute"]}.get(options, [])
    ranks = start(launcher, bed, *common, f"{kind}.train.backend=fsdp", f"{kind}.train.device=cpu")
    (run_reward if kind == "reward" else run_dpo)(bed.config(*common, name="alone"))
    finish(ranks)
    for ours, theirs in zip(steps_of(bed, "run"), steps_of(bed, "alone"), strict=True):
        for key, value in theirs.items():
            if "num_microbatches" not in key:
                assert ours[key] == pytest.approx(value, rel=1e-4, abs=1e-5), (ours["step"], key)


def test_two_ranks_fine_tune_as_one_does(sft_bed: Bed, launcher: Launcher):
    options = ("sft.steps=4", *QUIET)
    ranks = start(launcher, sft_bed, *options, *SFT_SHARED)
    run_sft(sft_bed.config(*options, name="alone"))
    finish(ranks)
    keys = ("sft/loss", "sft/grad_norm", "sft/num_tokens", "sft/lr")
    found, expected = (
        [[row[k] for k in keys] for row in steps_of(sft_bed, n)] for n in ("run", "alone")
    )
    assert len(expected) == 4
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


# --- as a user would type it ----------------------------------------------------------------------


@pytest.mark.long
def test_the_quickstart_learns_on_two_ranks_under_torchrun(tmp_path: Path):
    """Shortened: the warm-up's model spells some words right, a few steps make it more."""
    recipe = Path(tandem.__file__).parents[2] / "recipes" / "quickstart.yaml"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "tandem", "rl", str(recipe), f"run.output_dir={tmp_path}", "train.backend=fsdp"),
        *("steps=30", "tracking.progress=false", "train.device=cpu", "warmup.train.device=cpu"),
    ]
    source = str(Path(tandem.__file__).resolve().parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "quickstart" / "summary.json").read_text())
    assert summary["accuracy_after"] >= summary["accuracy_before"] + 0.15
