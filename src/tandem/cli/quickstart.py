"""``tandem quickstart``: the shipped recipe that learns within minutes on a laptop."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, takewhile
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.configs import CONFIG_FILE, DryRun, Overrides, Resume, print_config
from tandem.cli.training import import_trainers
from tandem.errors import ConfigError


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
    from tandem.config import load_config, resolve_recipe

    recipe = resolve_recipe("quickstart")
    config = load_config(recipe, changes, kind="rl")
    if not any(change.startswith("run.name=") for change in changes):
        runs = Path(config.run.output_dir)
        name = _latest(runs, config.run.name) if resume else _free(runs, config.run.name)
        config = load_config(recipe, [*changes, f"run.name={name}"], kind="rl")
    if dry_run:
        print_config(config)
        return
    import_trainers().run_rl(config, resume=resume)


def _free(runs: Path, name: str) -> str:
    """``name``, or ``name-2``, ``name-3``, … when runs of that name exist."""
    return next(run for run in _names(name) if not (runs / run).exists())


def _latest(runs: Path, name: str) -> str:
    """The last of the runs that ``_free`` named."""
    found = list(takewhile(lambda run: (runs / run / CONFIG_FILE).exists(), _names(name)))
    if not found:
        raise ConfigError(f"--resume: no quickstart in {str(runs)!r}; start one without --resume")
    return found[-1]


def _names(name: str) -> Iterator[str]:
    yield name
    for number in count(2):
        yield f"{name}-{number}"
