"""The numeric cases, each in float64 and float32 at its own tolerance."""

from pathlib import Path

import pytest

from tandem.testing.numerics import DTYPES, check_case, load_cases

CASES = load_cases(Path(__file__).with_name("cases.json"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_case_holds_at_its_tolerance(case, dtype):
    outcome = check_case(case, dtype)
    assert outcome.status == "pass", outcome.detail


def test_the_file_is_whole():
    assert len(CASES) == 106
    assert len({case["id"] for case in CASES}) == 106
