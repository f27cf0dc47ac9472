"""``tandem status``: where a run is, from the files in its directory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from tandem.errors import ConfigError
from tandem.observe import read_metrics, read_summary, text_plot

CURVES = ("reward/mean", "sft/loss", "dpo/loss", "reward_model/loss")
"""The first one that the run has is drawn."""


def status(
    run_dir: Annotated[Path, typer.Argument(help="A run's directory, e.g. outputs/quickstart.")],
) -> None:
    """Show the last step, the checkpoints and the curve of a run."""
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"run directory {str(run_dir)!r}: no run there (no config.yaml)")
    console = Console(soft_wrap=True)
    summary = read_summary(run_dir)
    console.print(Text(f"{run_dir}: {'finished' if summary else 'not finished'}", style="bold"))
    for name, value in (summary or {}).items():
        if isinstance(value, int | float | str):
            console.print(Text(f"  {name}: {value}"))
    checkpoints = sorted(
        (path.name for path in (run_dir / "checkpoints").glob("step_*") if path.name[5:].isdigit()),
        key=lambda name: int(name[5:]),
    )
    console.print(f"checkpoints: {', '.join(checkpoints) or 'none'}")
    rows = read_metrics(run_dir)
    if not rows:
        console.print("no step has been recorded yet")
        return
    age_s = max(0.0, time.time() - float(rows[-1].get("time", time.time())))
    console.print(f"last step: {rows[-1]['step']}, recorded {age_s:.0f} s ago")
    for name in CURVES:
        values = [row.get(name) for row in rows]
        if any(value is not None for value in values):
            console.print(Text(name, style="bold"))
            console.print(Text(text_plot(values, width=min(60, max(20, console.width - 12)))))
            return
