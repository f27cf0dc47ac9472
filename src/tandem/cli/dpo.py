"""``tandem dpo``: training on preferences."""

from __future__ import annotations

from tandem.cli.configs import ConfigArgument, DryRun, Overrides, Resume, print_config, read_config
from tandem.cli.training import import_trainers


def dpo(
    config: ConfigArgument,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    resume: Resume = False,
) -> None:
    """Train a model on preferences: DPO, IPO, SimPO, ORPO, KTO and others."""
    resolved = read_config(config, overrides, kind="dpo")
    if dry_run:
        print_config(resolved)
        return
    import_trainers().run_dpo(resolved, resume=resume)
