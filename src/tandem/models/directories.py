"""Writing model directories: all or nothing, and without the progress bars of transformers."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers.utils import logging as hf_logging

from tandem.files import sync


@contextmanager
def new_directory(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """A staging directory beside ``target``, renamed to it on success and removed on an error.

    Everything in it is durable before the rename. With ``replace`` an older ``target`` goes.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.parent / f".{target.name}-{uuid.uuid4().hex}"
    old = staging.with_name(f"{staging.name}.old")
    staging.mkdir()
    try:
        yield staging
        for path in staging.rglob("*"):
            sync(path)
        if replace and target.exists():
            os.rename(target, old)
        os.rename(staging, target)
        sync(target.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without the bars and loading reports of transformers: what matters is raised as an error."""
    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()
