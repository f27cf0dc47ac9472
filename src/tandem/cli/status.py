"""``tandem status``: where a run is, from the files in its directory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from tandem.errors import ConfigError

CURVES = ("reward/mean", "sft/loss", "dpo/loss", "reward_model/loss")
"""The first one that the run has is drawn."""
STILL_S = 10.0
"""A standstill that is worth a line."""


def status(
    run_dir: Annotated[Path, typer.Argument(help="A run's directory, e.g. outputs/quickstart.")],
) -> None:
    """Show what a run does now, its last step, its checkpoints and its curve."""
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"run directory {str(run_dir)!r}: no run there (no config.yaml)")
    from tandem.observe import read_metrics, read_summary, text_plot

    console = Console(soft_wrap=True)
    summary = read_summary(run_dir)
    console.print(Text(f"{run_dir}: {'finished' if summary else 'not finished'}", style="bold"))
    for name, value in (summary or {}).items():
        if isinstance(value, int | float | str):
            console.print(Text(f"  {name}: {value}"))
    if not summary:
        _print_now(console, run_dir)
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


def _print_now(console: Console, run_dir: Path) -> None:
    """Who waits for what, queue depths, capacity and ages, as the run wrote them last."""
    from tandem.observe.status import is_alive, read_status
    from tandem.rollout.snapshot import RolloutSnapshot

    now = read_status(run_dir)
    if now is None:
        return
    age_s = max(0.0, time.time() - now["time"])
    if not is_alive(now):
        console.print(f"no process of it runs here; it was in phase {now['phase']!r}")
        return
    console.print(
        Text(
            f"process {now['pid']}, seen {age_s:.0f} s ago: {now['phase']} for "
            f"{now['phase_for_s']:.0f} s, step {now['step']} of {now['steps']}"
        )
    )
    if now["still_for_s"] > STILL_S:
        limit = now["stall_timeout_s"]
        console.print(f"nothing has moved for {now['still_for_s']:.0f} s (limit {limit:.0f} s)")
    if "trouble" in now:
        console.print(Text(now["trouble"]))
    if "rollout" in now:
        console.print(Text(RolloutSnapshot.from_json(now["rollout"]).describe()))
    told = ", ".join(f"{name} {value}" for name, value in now.get("backend", {}).items())
    if told:
        console.print(Text(f"generator: {told}"))
