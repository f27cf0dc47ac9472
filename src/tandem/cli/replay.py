"""``tandem replay``: train again on a run's recorded schedule and compare every value."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def replay(
    run_dir: Annotated[Path, typer.Argument(help="A run's directory, e.g. outputs/quickstart.")],
    from_step: Annotated[
        int | None,
        typer.Option("--from-step", min=0, help="A checkpoint's step; default: the oldest."),
    ] = None,
) -> None:
    """Train again on what a run recorded; stop at the first value that differs."""
    from tandem.trainers import run_replay

    report = run_replay(
        run_dir, from_step=from_step, on_step=lambda step: typer.echo(f"step {step}: identical")
    )
    typer.echo(
        f"steps {report.first} to {report.last}: all {report.num_values} values are identical, the "
        "weights after every step included"
    )
