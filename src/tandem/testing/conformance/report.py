"""How outcomes are shown: a table on the screen, JSON in a file. No checks here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.errors import DataError
from tandem.testing.conformance.figure import Outcome
from tandem.testing.conformance.run import Report

COLOURS = {"pass": "green", "fail": "bold red", "not applicable": "yellow"}


def print_report(report: Report, console: Console | None = None) -> None:
    """The table, the tracebacks of checks that raised, and one line with the counts."""
    console = console or Console()
    console.print(Text(f"conformance: {report.subject}", style="bold"))
    console.print(table(report.outcomes))
    shown: dict[str, str] = {}
    for outcome in report.failed:
        if not outcome.trace:
            continue
        first = shown.setdefault(outcome.detail, outcome.check)
        text = outcome.trace.rstrip() if first == outcome.check else f"the same as {first}"
        console.print(Text(f"\n{outcome.check}\n{text}", style="red"))
    console.print(Text(summary(report)))


def table(outcomes: Sequence[Outcome]) -> Table:
    rows = Table("check", "figure", "tolerance", "verdict", "largest of / why")
    for outcome in outcomes:
        rows.add_row(
            outcome.check,
            _number(outcome.figure),
            _number(outcome.tolerance),
            Text(outcome.verdict, style=COLOURS[outcome.verdict]),
            Text(outcome.detail),
        )
    return rows


def summary(report: Report) -> str:
    counts = {name: sum(o.verdict == name for o in report.outcomes) for name in COLOURS}
    return ", ".join(f"{number} {name}" for name, number in counts.items())


def write_json(report: Report, path: Path) -> None:
    """The subject, the verdict, and every figure of every check.

    Raises:
        DataError: the file cannot be written.
    """
    subject = report.subject
    content = {
        "backend": subject.backend,
        "model_type": subject.model_type,
        "world": subject.world,
        "lora": subject.lora,
        "dtype": subject.dtype,
        "device": subject.device,
        "train": dict(subject.train),
        "passed": report.passed,
        "checks": [outcome.to_json() for outcome in report.outcomes],
    }
    try:
        path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(f"--json {path}: cannot be written: {error}") from error


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2g}"
