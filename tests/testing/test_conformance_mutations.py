"""Every check of the kit has been seen failing: each broken engine is caught by the check it names.

That the same checks pass on engines that are right is the business of ``test_conformance`` and
``test_conformance_ranks``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.testing.conformance import CHECKS, Outcome, Subject, run
from tandem.testing.conformance.world import Job, run_ranks
from tandem.train import LocalTrainEngine
from tests.testing.mutants import MUTANTS
from tests.testing.rank_mutants import RANK_MUTANTS

ORACLE_CHECKS = ("oracle: losses", "oracle: gradients")


def assert_caught(outcome: Outcome, figure: str) -> None:
    assert outcome.verdict == "fail"
    missed = [part.name for part in outcome.parts if not part.passed] or [outcome.detail]
    assert any(figure in name for name in missed), (missed, outcome.trace)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_engine_is_caught(name: str) -> None:
    mutant = MUTANTS[name]
    report = run(name, device="cpu", checks=[mutant.check], **mutant.options)
    assert_caught(report[mutant.check], mutant.figure)


def test_broken_ranks_are_caught(tmp_path: Path) -> None:
    tasks = [(Subject(name, world=2), check) for name, (check, _) in RANK_MUTANTS.items()]
    outcomes = run_ranks(Job(tasks, ("tests.testing.rank_mutants",)), tmp_path)
    for outcome, (_, figure) in zip(outcomes, RANK_MUTANTS.values(), strict=True):
        assert_caught(outcome, figure)


def test_a_broken_oracle_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = LocalTrainEngine._score

    def without_temperature(self, packed, temperature_B, names):  # type: ignore[no-untyped-def]
        return original(self, packed, None, names)

    monkeypatch.setattr(LocalTrainEngine, "_score", without_temperature)
    report = run("local", device="cpu", checks=ORACLE_CHECKS)
    assert [outcome.verdict for outcome in report.outcomes] == ["fail", "fail"]


def test_every_check_has_a_broken_engine() -> None:
    seen = {mutant.check for mutant in MUTANTS.values()}
    seen |= {check for check, _ in RANK_MUTANTS.values()}
    sharded = {"tensor parallelism", "sequence parallelism"}
    assert seen | set(ORACLE_CHECKS) == set(CHECKS) - sharded
