"""What a check returns: figures with tolerances, and the verdict that follows from them.

Measuring belongs to the checks, printing to ``report``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["pass", "fail", "not applicable"]


class NotApplicable(Exception):
    """Raised by a check that has nothing to check on this subject; the message says why."""


@dataclass(frozen=True, slots=True)
class Part:
    """One figure of a check: what was compared, how far off it was, how far it may be."""

    name: str
    value: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.value <= self.tolerance

    @property
    def severity(self) -> float:
        """Value over tolerance; infinite for NaN and for any miss of a tolerance of 0."""
        if math.isnan(self.value):
            return math.inf
        if self.tolerance > 0:
            return self.value / self.tolerance
        return 0.0 if self.value <= self.tolerance else math.inf


Figure = Sequence[Part]
"""All that one check measured; never empty."""


def count(name: str, problems: Iterable[str]) -> Part:
    """A figure for yes-or-no questions: how many answers were wrong, named after the first."""
    found = list(problems)
    return Part(f"{name}: {found[0]}" if found else name, float(len(found)), 0.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One check on one subject; with several ranks the worst of them."""

    check: str
    verdict: Verdict
    figure: float | None = None
    tolerance: float | None = None
    detail: str = ""
    trace: str = ""
    parts: tuple[Part, ...] = field(default=(), repr=False)

    @classmethod
    def measured(cls, check: str, parts: Figure) -> Outcome:
        if not parts:
            raise ValueError(f"{check}: a check must measure something")
        worst = max(parts, key=lambda part: part.severity)
        verdict: Verdict = "pass" if all(part.passed for part in parts) else "fail"
        return cls(check, verdict, worst.value, worst.tolerance, worst.name, parts=tuple(parts))

    @classmethod
    def skipped(cls, check: str, why: str) -> Outcome:
        return cls(check, "not applicable", detail=why)

    @classmethod
    def raised(cls, check: str, detail: str, trace: str) -> Outcome:
        return cls(check, "fail", detail=detail, trace=trace)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outcome:
        """From ``dataclasses.asdict``, as a rank sends it."""
        parts = tuple(Part(**part) for part in data["parts"])
        return cls(**{**data, "parts": parts})

    def to_json(self) -> dict[str, Any]:
        """For a report: not finite numbers are text."""
        return {
            "check": self.check,
            "verdict": self.verdict,
            "figure": finite(self.figure),
            "tolerance": self.tolerance,
            "detail": self.detail,
            "trace": self.trace,
            "parts": [[part.name, finite(part.value), part.tolerance] for part in self.parts],
        }


def finite(value: float | None) -> float | str | None:
    """The value as JSON has it: not finite ones as text."""
    return value if value is None or math.isfinite(value) else str(value)


def merge(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of a check from those of all ranks: a failure wins, then the worst figure."""
    check = outcomes[0].check
    traced = [outcome for outcome in outcomes if outcome.trace]
    if traced:
        return traced[0]
    parts = [part for outcome in outcomes for part in outcome.parts]
    return Outcome.measured(check, parts) if parts else outcomes[0]
