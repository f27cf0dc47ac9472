"""Writing one checkpoint: files in a hidden directory, then manifest, rename, retention, upload.

Nothing counts before the rename; engines write into folders of ``Staging.path`` (``policy/``).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from tandem.checkpoint.directory import (
    STAGING_PREFIX,
    checkpoints_dir,
    quarantine,
    remove_unfinished,
    retain,
    step_dir,
    verify_cached,
)
from tandem.checkpoint.manifest import fsync_directory, write_manifest
from tandem.checkpoint.remote import upload
from tandem.checkpoint.scratch import create_scratch
from tandem.errors import CheckpointError
from tandem.observe.moments import reach


@dataclass(slots=True)
class Staging:
    """A checkpoint being written.

    ``manifest_extra`` goes into the manifest as typed JSON (see ``state.py``): data position, open
    episode ids, versions.
    """

    path: Path
    step: int
    manifest_extra: dict[str, Any] = field(default_factory=dict)


@contextmanager
def staging(
    run_dir: Path | str, step: int, *, keep: int | None, upload_url: str | None = None
) -> Iterator[Staging]:
    """Write checkpoint ``step``: it appears complete when the block ends, or not at all.

    ``keep`` valid checkpoints stay on disk (None: all), counted after this one has landed.
    ``upload_url`` (any fsspec URL) gets a copy ``step_N``. An exception in the block removes what
    was written.

    Raises:
        CheckpointError: a valid checkpoint of this step exists, the disk is full, or the upload
            failed (the local one is then complete).
    """
    if step < 0 or (keep is not None and keep < 1):
        raise CheckpointError(
            f"step, keep: got {step}, {keep}, allowed: step >= 0, keep None or >= 1"
        )
    target = step_dir(run_dir, step)
    try:
        _make_parent(run_dir)
        remove_unfinished(run_dir)
        _refuse_valid(target)
        scratch = create_scratch(target.parent, f"{STAGING_PREFIX}{step}")
    except OSError as error:
        raise _write_error(target, error) from error
    try:
        open_staging = Staging(scratch.path, step)
        yield open_staging
        write_manifest(scratch.path, step=step, extra=open_staging.manifest_extra)
        _land(scratch.path, target)
    except (OSError, SafetensorError) as error:
        raise _write_error(target, error) from error
    finally:
        shutil.rmtree(scratch.path, ignore_errors=True)
        scratch.close()
    if keep is not None:
        retain(run_dir, keep)
    if upload_url is not None:
        upload(target, f"{upload_url.rstrip('/')}/{target.name}")


def _make_parent(run_dir: Path | str) -> None:
    parent = checkpoints_dir(run_dir)
    if not parent.is_dir():
        parent.mkdir(parents=True, exist_ok=True)
        fsync_directory(parent.parent)


def _refuse_valid(target: Path) -> None:
    """A damaged target may be replaced, a valid one never."""
    if not target.exists():
        return
    try:
        verify_cached(target)
    except CheckpointError:
        return
    raise CheckpointError(
        f"{target}: exists and is valid, and is never overwritten; resume from it, or rename it "
        "(supersede_newer) if the run goes back"
    )


def _land(scratch: Path, target: Path) -> None:
    _refuse_valid(target)
    if target.exists():
        quarantine(target)
    scratch.chmod(0o755)
    reach("checkpoint.before_rename")
    scratch.rename(target)
    fsync_directory(target.parent)
    reach("checkpoint.after_rename")
    verify_cached(target)


def _write_error(target: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{target}: cannot be written ({type(error).__name__}: {error}); earlier checkpoints are "
        "untouched. Free disk space, lower checkpoint.keep or move run.output_dir"
    )
