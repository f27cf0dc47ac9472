"""The numerics kit itself: it must be able to fail."""

import json
import math

import pytest
import torch

from tandem.errors import DataError
from tandem.testing.numerics import check_case, largest_miss, load_cases, main


def rloo_case(**changes):
    case = {
        "id": "rloo",
        "algorithm": "rloo",
        "inputs": {"scores": [2.0, 4.0, 9.0], "group": ["a", "a", "a"]},
        "params": {},
        "expected": {"advantages": [-4.5, -1.5, 6.0]},
        "tolerance": {"float64": 1e-9, "float32": 1e-5},
    }
    return case | changes


def write(tmp_path, *cases):
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({"cases": list(cases)}))
    return str(path)


def test_right_values_exit_with_0(tmp_path, capsys):
    assert main([write(tmp_path, rloo_case())]) == 0
    assert "2 pass" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"expected": {"advantages": [-4.5, -1.5, 6.001]}}, "fail"),
        ({"expected": {"advantages": [-4.5, -1.5]}}, "fail"),
        ({"expected": {"something_else": 1.0}}, "fail"),
        ({"algorithm": "never_heard_of"}, "not covered"),
    ],
)
def test_a_miss_or_an_unknown_algorithm_exits_with_1(tmp_path, capsys, changes, word):
    assert main([write(tmp_path, rloo_case(**changes), rloo_case())]) == 1
    assert f"2 {word}" in capsys.readouterr().out


def test_unreadable_files_are_data_errors(tmp_path, capsys):
    with pytest.raises(DataError, match=r"nothing\.json"):
        load_cases(tmp_path / "nothing.json")
    broken = rloo_case()
    del broken["expected"]
    with pytest.raises(DataError, match="case 0 lacks expected"):
        load_cases(write(tmp_path, broken))
    assert main([str(tmp_path / "nothing.json")]) == DataError.exit_code
    assert main([]) == 2


def test_tolerance_is_relative_only_where_the_case_says_so():
    tolerance = {"float64": 0.01, "float32": 0.01}
    off = {"advantages": [-4.53, -1.51, 6.04]}
    absolute = rloo_case(expected=off, tolerance=tolerance)
    relative = rloo_case(expected=off, tolerance=tolerance | {"kind": "relative"})
    assert check_case(absolute, "float64").status == "fail"
    assert check_case(relative, "float64").status == "pass"


def test_comparison_sees_nan_infinities_and_structure():
    assert largest_miss(torch.tensor([float("nan"), 1.0]), ["nan", 1.0]) == 0.0
    assert largest_miss(torch.tensor([0.0, 1.0]), ["nan", 1.0]) == math.inf
    assert largest_miss(-math.inf, "inf") == math.inf
    assert largest_miss({"a": 1.0}, {"b": 1.0}) == math.inf
    assert largest_miss("error", 1.0) == math.inf
    assert largest_miss([[1.0, 2.5]], [1.0, 2.0]) == 0.5
