"""The kit over several processes: a foreign backend conforms, broken ones are caught, and a rank
that is lost costs one check only.

Starting ranks takes seconds, so that the tests share one job.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.errors import EngineError
from tandem.testing.conformance import Outcome, Subject, run, world
from tandem.testing.conformance.world import Job, run_ranks
from tests.testing.data_parallel import BACKEND
from tests.testing.mutants import assert_caught
from tests.testing.rank_mutants import RANK_MUTANTS

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
    "row over the cap",
)
RIGHT = Subject(BACKEND, world=2)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    """Of a backend that is right, of the broken ones, of one that dies, and of a check after it."""
    tasks = [(RIGHT, check) for check in OF_RANKS]
    tasks += [
        (Subject(name, world=2, train={"parallel": parallel}), check)
        for name, (check, _, parallel) in RANK_MUTANTS.items()
    ]
    tasks += [(Subject("dies", world=2), "version"), (RIGHT, "version")]
    return run_ranks(Job(tasks, MODULES), tmp_path_factory.mktemp("ranks"))


def test_a_foreign_data_parallel_backend_conforms(outcomes):
    found = outcomes[: len(OF_RANKS)]
    assert {outcome.check: outcome.verdict for outcome in found} == dict.fromkeys(OF_RANKS, "pass")


@pytest.mark.parametrize("number", range(len(RANK_MUTANTS)), ids=list(RANK_MUTANTS))
def test_broken_ranks_are_caught(outcomes, number):
    _, figure, _ = list(RANK_MUTANTS.values())[number]
    assert_caught(outcomes[len(OF_RANKS) + number], figure)


def test_a_rank_that_dies_is_named_and_the_next_check_runs(outcomes):
    died, after = outcomes[-2:]
    assert died.verdict == "fail"
    assert died.detail == "rank 1 died with exit code 3"
    assert "the last words" in died.trace
    assert after.verdict == "pass"


@pytest.mark.long
def test_a_foreign_data_parallel_backend_conforms_as_a_whole():
    report = run(BACKEND, world=2, device="cpu", modules=MODULES)
    assert report.failed == []
    assert report["world size"].verdict == "pass"


@pytest.mark.long
@pytest.mark.parametrize("axis", [None, "tensor", "sequence"])
@pytest.mark.parametrize("model_type", ["language_model", "value_model", "reward_model"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_sharded_engine_conforms(axis, model_type, lora):
    report = run(
        "fsdp", world=2, device="cpu", model_type=model_type, lora=lora,
        train={"parallel": {axis: 2} if axis else {}},
    )  # fmt: skip
    assert report.failed == []
    name = f"{axis} parallelism" if axis else "world size"
    assert report[name].verdict == "pass"


@pytest.mark.long
@pytest.mark.parametrize(
    "parallel", [{}, {"replicate": 2}, {"tensor": 2}, {"sequence": 2}], ids=str
)
def test_the_sharded_engine_conforms_on_four_ranks(parallel):
    report = run("fsdp", world=4, device="cpu", train={"parallel": parallel})
    assert report.failed == []
    assert report["world size"].verdict == "pass"


def after_losing(name: str, scratch: Path, timeout_s: float = 120.0) -> list[Outcome]:
    tasks = [(Subject(name, world=2), "version"), (RIGHT, "version")]
    return run_ranks(Job(tasks, MODULES, timeout_s), scratch)


@pytest.mark.long
def test_a_rank_that_raises_alone_does_not_hang_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(world, "GRACE_S", 2.0)
    raised, after = after_losing("raises", tmp_path)
    assert raised.detail == "rank 1: KeyError: 'only here'"
    assert "in fail" in raised.trace
    assert after.verdict == "pass"


@pytest.mark.long
def test_a_rank_that_hangs_is_ended_at_the_deadline_and_says_where(tmp_path):
    hung, after = after_losing("hangs", tmp_path, timeout_s=30.0)
    assert hung.verdict == "fail"
    assert "does not answer" in hung.detail
    assert "most recent call first" in hung.trace
    assert after.verdict == "pass"


@pytest.mark.long
def test_ranks_that_do_not_start_say_why(tmp_path):
    with pytest.raises(EngineError, match=r"(?s)rank 0 of 2 did not start.*no_such_module"):
        run_ranks(Job([(RIGHT, "version")], ("no_such_module",)), tmp_path)
