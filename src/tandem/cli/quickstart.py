"""``tandem quickstart``: the shipped recipe that learns within minutes on a laptop."""

from __future__ import annotations

from typing import Annotated

import typer

from tandem.cli.configs import DryRun, Overrides, Resume, print_config
from tandem.config import load_config, resolve_recipe


def quickstart(
    overrides: Overrides = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Same as run.seed=N.")] = None,
    dry_run: DryRun = False,
    resume: Resume = False,
) -> None:
    """Train a tiny model by reinforcement learning, from nothing, on this machine."""
    changes = list(overrides or ())
    if seed is not None:
        changes.append(f"run.seed={seed}")
    config = load_config(resolve_recipe("quickstart"), changes, kind="rl")
    if dry_run:
        print_config(config)
        return
    from tandem.trainers import run_rl

    run_rl(config, resume=resume)
