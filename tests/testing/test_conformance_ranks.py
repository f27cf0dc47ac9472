"""The kit over several processes: a foreign backend conforms, a lost rank costs one check only."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.testing.conformance import CHECKS, Subject, run, world
from tandem.testing.conformance.world import Job, run_ranks
from tests.testing.data_parallel import BACKEND

MODULES = ("tests.testing.rank_mutants",)
OF_RANKS = (
    "gradients",
    "world size",
    "zero-weight rank",
    "uneven tokens",
    "unequal micro-batches",
    "non-finite gradient",
    "optimizer steps",
    "resume",
    "reshard",
)


def lost(name: str, scratch: Path, timeout_s: float = 60.0):
    """A check on a backend that loses a rank, then one on a backend that is right."""
    tasks = [(Subject(name, world=2), "version"), (Subject(BACKEND, world=2), "version")]
    return run_ranks(Job(tasks, MODULES, timeout_s), scratch)


def test_a_foreign_data_parallel_backend_conforms():
    report = run(BACKEND, world=2, device="cpu", modules=MODULES, checks=OF_RANKS)
    assert {outcome.check: outcome.verdict for outcome in report.outcomes} == dict.fromkeys(
        [name for name in CHECKS if name in OF_RANKS], "pass"
    )


@pytest.mark.long
def test_a_foreign_data_parallel_backend_conforms_as_a_whole():
    report = run(BACKEND, world=2, device="cpu", modules=MODULES)
    assert report.failed == []
    assert report["world size"].verdict == "pass"


def test_a_rank_that_dies_is_named_and_the_next_check_runs(tmp_path):
    first, second = lost("dies", tmp_path)
    assert first.verdict == "fail"
    assert first.detail == "rank 1 died with exit code 3"
    assert "the last words" in first.trace
    assert second.verdict == "pass"


@pytest.mark.long
def test_a_rank_that_raises_alone_does_not_hang_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(world, "GRACE_S", 2.0)
    first, second = lost("raises", tmp_path)
    assert first.detail == "rank 1: KeyError: 'only here'"
    assert "in fail" in first.trace
    assert second.verdict == "pass"


@pytest.mark.long
def test_a_rank_that_hangs_is_ended_at_the_deadline_and_says_where(tmp_path):
    first, second = lost("hangs", tmp_path, timeout_s=20.0)
    assert first.verdict == "fail"
    assert "does not answer" in first.detail
    assert "most recent call first" in first.trace
    assert second.verdict == "pass"
