"""``tandem sft``: supervised fine-tuning on demonstrations."""

from __future__ import annotations

from tandem.cli.configs import ConfigArgument, DryRun, Overrides, Resume, print_config, read_config
from tandem.cli.training import import_trainers


def sft(
    config: ConfigArgument,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    resume: Resume = False,
) -> None:
    """Fine-tune a model on demonstrations."""
    resolved = read_config(config, overrides, kind="sft")
    if dry_run:
        print_config(resolved)
        return
    import_trainers().run_sft(resolved, resume=resume)
