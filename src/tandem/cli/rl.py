"""``tandem rl``: reinforcement learning with a reward."""

from __future__ import annotations

from tandem.cli.configs import ConfigArgument, DryRun, Overrides, Resume, print_config, read_config
from tandem.cli.training import import_trainers


def rl(
    config: ConfigArgument,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    resume: Resume = False,
) -> None:
    """Train a model by reinforcement learning."""
    resolved = read_config(config, overrides, kind="rl")
    if dry_run:
        print_config(resolved)
        return
    import_trainers().run_rl(resolved, resume=resume)
