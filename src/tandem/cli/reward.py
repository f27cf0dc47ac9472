"""``tandem reward``: training of a reward model."""

from __future__ import annotations

from tandem.cli.configs import ConfigArgument, DryRun, Overrides, Resume, print_config, read_config
from tandem.cli.training import import_trainers


def reward(
    config: ConfigArgument,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    resume: Resume = False,
) -> None:
    """Train a reward model on pairs of responses."""
    resolved = read_config(config, overrides, kind="reward")
    if dry_run:
        print_config(resolved)
        return
    import_trainers().run_reward(resolved, resume=resume)
