"""How a run ends: ``summary.json`` for programs, one screen for people."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tandem.files import write_durably
from tandem.observe.plot import text_plot

SUMMARY_FILE = "summary.json"


def write_summary(run_dir: str | Path, summary: Mapping[str, Any]) -> Path:
    """Write ``run_dir/summary.json`` in one piece; NaN and infinities become null."""
    path = Path(run_dir) / SUMMARY_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_jsonable(summary), indent=2, allow_nan=False) + "\n"
    write_durably(path, text)
    return path


def read_summary(run_dir: str | Path) -> dict[str, Any] | None:
    """What ``write_summary`` wrote, or None while the run has not ended."""
    path = Path(run_dir) / SUMMARY_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt with its completion; ``correct`` is None where nothing was scored."""

    prompt: str
    completion: str
    correct: bool | None = None


@dataclass(frozen=True, slots=True)
class RunReport:
    """What ``final_screen`` shows; samples before and after are paired by their prompts."""

    title: str
    run_dir: Path
    steps: int
    wall_s: float
    model_dir: Path | None = None
    before: float | None = None
    after: float | None = None
    metric: str = "accuracy"
    num_problems: int | None = None
    trainer_wait: float | None = None
    """Share of the steps' time that the trainer waited for rollouts."""
    generator_idle: float | None = None
    """Share of it in which the generator had nothing to do."""
    rewards: Sequence[float | None] = ()
    curve: str = "mean reward"
    samples_before: Sequence[Sample] = ()
    samples_after: Sequence[Sample] = ()
    next_commands: Sequence[str] = field(default_factory=tuple)


def final_screen(report: RunReport, console: Console | None = None) -> None:
    """Print what happened, where the results are, and what to type next."""
    screen = console or Console()
    screen.print()
    screen.print(Panel(_headline(report), title=Text(report.title), expand=False))
    if report.samples_after:
        screen.print(_samples(report))
    if report.rewards:
        screen.print(Text(f"{report.curve} over {len(report.rewards)} steps", style="bold"))
        screen.print(Text(text_plot(report.rewards, width=min(60, max(20, screen.width - 12)))))
    screen.print(_line("run", str(report.run_dir)), soft_wrap=True)
    if report.model_dir:
        screen.print(_line("model", str(report.model_dir)), soft_wrap=True)
    screen.print(Text("\nWhat next", style="bold"))
    for command in report.next_commands or _default_commands(report):
        screen.print(Text(f"  {command}", style="cyan"), soft_wrap=True)


def _headline(report: RunReport) -> Text:
    text = Text(f"{report.steps} steps in {report.wall_s:.0f} s")
    if report.trainer_wait is not None:
        text.append(f"\nof their time the trainer waited for rollouts {report.trainer_wait:.0%}")
        if report.generator_idle is not None:
            text.append(f", the generator had nothing to do {report.generator_idle:.0%}")
    if report.after is None:
        return text
    of = f" of {report.num_problems} held-out problems" if report.num_problems else ""
    text.append(f"\n{report.metric}{of}: ")
    if report.before is not None:
        text.append(f"{report.before:.3f}", style="yellow")
        text.append(" before, ")
    text.append(f"{report.after:.3f}", style="bold green")
    text.append(" after")
    return text


def _samples(report: RunReport) -> Table:
    table = Table("prompt", title="The same prompts before and after", title_justify="left")
    if report.samples_before:
        table.add_column("before")
    table.add_column("after")
    befores = {sample.prompt: sample for sample in report.samples_before}
    for after in report.samples_after:
        before = befores.get(after.prompt, Sample(after.prompt, ""))
        cells = [_completion(before)] if befores else []
        table.add_row(Text(after.prompt), *cells, _completion(after))
    return table


def _completion(sample: Sample) -> Text:
    style = {True: "green", False: "red", None: ""}[sample.correct]
    mark = {True: "✓ ", False: "✗ ", None: ""}[sample.correct]
    return Text(mark + sample.completion.strip(), style=style)


def _line(name: str, value: str) -> Text:
    return Text.assemble((f"{name:<6}", "bold"), value)


def _default_commands(report: RunReport) -> list[str]:
    commands = [f"tandem status {report.run_dir}"]
    if report.model_dir:
        prompt = report.samples_after[0].prompt if report.samples_after else "Hello"
        quoted = "'" + prompt.replace("'", "'\\''") + "'"
        if "\n" in prompt:
            quoted = "'...'"
        commands.insert(0, f"tandem generate {report.model_dir} --prompt {quoted}")
        if report.num_problems:
            commands.insert(1, f"tandem eval {report.run_dir}")
    return commands


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _jsonable(child) for name, child in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(child) for child in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
