"""The handed numeric cases, each in float64 and float32 at its own tolerance."""

from pathlib import Path

import pytest

from tandem.testing.numerics import DTYPES, check_case, load_cases

CASES = load_cases(Path(__file__).with_name("cases.json"))

NOT_COVERED = {
    "adamw": "the optimizer step of the train engine",
    "grad_clip": "the gradient clipping of the train engine",
    "lr_schedule": "the schedules of the train engine",
    "precision": "master weights of the train engine",
}
"""Algorithms whose cases have no check yet, and where the code lives."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "case", [case for case in CASES if case["algorithm"] not in NOT_COVERED], ids=lambda c: c["id"]
)
def test_case_holds_at_its_tolerance(case, dtype):
    outcome = check_case(case, dtype)
    assert outcome.status == "pass", outcome.detail


def test_every_case_is_checked_or_named_as_not_covered():
    uncovered = {
        case["algorithm"] for case in CASES if check_case(case, "float64").status == "not covered"
    }
    assert uncovered == set(NOT_COVERED)
    assert len(CASES) == 106
