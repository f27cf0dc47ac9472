"""Every check of the kit has been seen failing: broken engines are caught by the checks they name.

Those that need several ranks are in ``test_conformance_ranks``; that the same checks pass on
engines that are right is shown in ``test_conformance``.
"""

from __future__ import annotations

import pytest

from tandem.testing.conformance import CHECKS, run
from tandem.train import LocalTrainEngine
from tests.testing.mutants import MUTANTS, assert_caught
from tests.testing.rank_mutants import RANK_MUTANTS

ORACLE_CHECKS = ("oracle: losses", "oracle: gradients")


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_engine_is_caught(name: str) -> None:
    mutant = MUTANTS[name]
    report = run(name, device="cpu", checks=[mutant.check], **mutant.options)
    assert_caught(report[mutant.check], mutant.figure)


def test_a_broken_oracle_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = LocalTrainEngine._score

    def without_temperature(self, packed, temperature_B, names):  # type: ignore[no-untyped-def]
        return original(self, packed, None, names)

    monkeypatch.setattr(LocalTrainEngine, "_score", without_temperature)
    report = run("local", device="cpu", checks=ORACLE_CHECKS)
    assert [outcome.verdict for outcome in report.outcomes] == ["fail", "fail"]


def test_every_check_has_a_broken_engine() -> None:
    seen = {mutant.check for mutant in MUTANTS.values()}
    seen |= {check for check, *_ in RANK_MUTANTS.values()}
    assert seen | set(ORACLE_CHECKS) == set(CHECKS)
