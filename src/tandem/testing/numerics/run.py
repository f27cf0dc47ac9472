"""Check the library against a file of numeric cases: ``python -m tandem.testing.numerics FILE``.

Every case is computed in float64 and in float32 and compared at the tolerance it states. A value
that misses, a key that is not computed and an algorithm without a check all count as failures.
What does not belong here: the checks themselves (the files beside this one).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tandem.errors import DataError, TandemError
from tandem.testing.numerics.case import Case
from tandem.testing.numerics.table import CHECKS

DTYPES: dict[str, torch.dtype] = {"float64": torch.float64, "float32": torch.float32}

Status = Literal["pass", "fail", "not covered"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One case in one dtype; ``detail`` says what missed."""

    case_id: str
    algorithm: str
    dtype: str
    status: Status
    detail: str = ""


def load_cases(path: str | Path) -> list[dict[str, Any]]:
    """The cases of a numerics file.

    Raises:
        DataError: no such file, not JSON, or a case lacks a field.
    """
    try:
        cases = json.loads(Path(path).read_text(encoding="utf-8"))["cases"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not a readable numerics file ({error!r})") from error
    for number, case in enumerate(cases):
        missing = {"id", "algorithm", "inputs", "params", "expected", "tolerance"} - set(case)
        if missing:
            raise DataError(f"{path}: case {number} lacks {', '.join(sorted(missing))}")
    return cases


def check_case(case: Mapping[str, Any], dtype: str) -> Outcome:
    """Compute one case in ``dtype`` and compare every expected value."""
    name = case["algorithm"]
    if name not in CHECKS:
        return Outcome(case["id"], name, dtype, "not covered", f"no check for {name!r}")
    view = Case(case["id"], case["inputs"], case["params"], DTYPES[dtype])
    computed = CHECKS[name](view)
    tolerance = case["tolerance"]
    is_relative = tolerance.get("kind") == "relative"
    misses = []
    for key, expected in case["expected"].items():
        if key not in computed:
            misses.append(f"{key}: not computed")
            continue
        worst = largest_miss(computed[key], expected, is_relative=is_relative)
        if not worst <= tolerance[dtype]:
            misses.append(f"{key}: off by {worst:.3g}, allowed {tolerance[dtype]:.3g}")
    return Outcome(case["id"], name, dtype, "fail" if misses else "pass", "; ".join(misses))


def largest_miss(computed: Any, expected: Any, *, is_relative: bool = False) -> float:
    """Largest difference over nested lists and dicts; inf where shapes or kinds differ."""
    if isinstance(computed, Tensor):
        computed = computed.detach().cpu().tolist()
    if isinstance(expected, Mapping):
        if not isinstance(computed, Mapping) or set(computed) != set(expected):
            return math.inf
        pairs = [(computed[key], expected[key]) for key in expected]
        return max((largest_miss(c, e, is_relative=is_relative) for c, e in pairs), default=0.0)
    if isinstance(expected, list):
        if isinstance(computed, tuple):
            computed = list(computed)
        if isinstance(computed, list) and len(computed) == 1 and len(expected) != 1:
            computed = computed[0]
        if not isinstance(computed, list) or len(computed) != len(expected):
            return math.inf
        pairs = list(zip(computed, expected, strict=True))
        return max((largest_miss(c, e, is_relative=is_relative) for c, e in pairs), default=0.0)
    if isinstance(computed, list):
        if len(computed) != 1:
            return math.inf
        return largest_miss(computed[0], expected, is_relative=is_relative)
    return _difference(computed, expected, is_relative)


def _difference(computed: Any, expected: Any, is_relative: bool) -> float:
    if isinstance(expected, str) and expected not in ("nan", "inf", "-inf"):
        return 0.0 if computed == expected else math.inf
    if isinstance(computed, str) or computed is None:
        return math.inf
    got, want = float(computed), float(expected)
    if got == want or (math.isnan(got) and math.isnan(want)):
        return 0.0
    if not (math.isfinite(got) and math.isfinite(want)):
        return math.inf
    return abs(got - want) / (abs(want) if is_relative and want else 1.0)


def run_file(path: str | Path) -> list[Outcome]:
    """Every case of the file in every dtype."""
    return [check_case(case, dtype) for case in load_cases(path) for dtype in DTYPES]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of outcomes; 0 if all passed, 1 if not, 2 for wrong usage."""
    arguments = sys.argv[1:] if arguments is None else arguments
    console = Console()
    if len(arguments) != 1 or arguments[0].startswith("-"):
        console.print("usage: python -m tandem.testing.numerics FILE.json", markup=False)
        return 2
    try:
        outcomes = run_file(arguments[0])
    except TandemError as error:
        console.print(f"error: {error}", markup=False)
        return error.exit_code
    table = Table("case", "algorithm", "dtype", "status", "detail")
    for outcome in outcomes:
        colour = {"pass": "green", "fail": "red"}.get(outcome.status, "yellow")
        table.add_row(
            outcome.case_id,
            outcome.algorithm,
            outcome.dtype,
            f"[{colour}]{outcome.status}[/]",
            outcome.detail,
        )
    console.print(table)
    counts = {status: sum(o.status == status for o in outcomes) for status in Status.__args__}  # type: ignore[attr-defined]
    console.print(", ".join(f"{count} {status}" for status, count in counts.items()))
    return 0 if counts["pass"] == len(outcomes) else 1
