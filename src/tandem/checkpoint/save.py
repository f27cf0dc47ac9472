"""Writing one checkpoint: files in a hidden directory, then manifest, rename, retention, upload.

Nothing counts before the rename; engines write into folders of ``Staging.path`` (``policy/``).
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tandem.checkpoint.background import BackgroundWriter
from tandem.checkpoint.directory import (
    STAGING_PREFIX,
    checkpoints_dir,
    quarantine,
    remember_verified,
    remove_unfinished,
    retain,
    step_dir,
    verify_cached,
)
from tandem.checkpoint.files import StagedFiles, staged_files
from tandem.checkpoint.manifest import write_manifest
from tandem.checkpoint.remote import upload
from tandem.checkpoint.scratch import ScratchDirectory, create_scratch
from tandem.checkpoint.state import encode
from tandem.errors import CheckpointError
from tandem.files import sync
from tandem.observe.moments import reach

logger = logging.getLogger(__name__)


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
    run_dir: Path | str,
    step: int,
    *,
    keep: int | None,
    upload_url: str | None = None,
    background: BackgroundWriter | None = None,
) -> Iterator[Staging]:
    """Write checkpoint ``step``: it appears complete when the block ends, or not at all.

    ``keep`` valid checkpoints stay on disk (None: all), counted after this one has landed.
    ``upload_url`` (any fsspec URL) gets a copy ``step_N``. An exception in the block removes what
    was written. With ``background`` the block ends when tensors and state are copied; the rest is
    done by its thread, and the checkpoint appears, complete, some time later.

    Raises:
        CheckpointError: a valid checkpoint of this step exists, the disk is full, or the upload
            failed (the local one is then complete); with ``background`` also what went wrong with
            the save before, which this one waits for.
    """
    if step < 0 or (keep is not None and keep < 1):
        raise CheckpointError(
            f"step, keep: got {step}, {keep}, allowed: step >= 0, keep None or >= 1"
        )
    target = step_dir(run_dir, step)
    if background is not None:
        if background.is_busy:
            logger.warning("%s waits for the checkpoint before it to be written", target.name)
        background.wait()
    try:
        _make_parent(run_dir)
        remove_unfinished(run_dir)
        _refuse_valid(target)
        scratch = create_scratch(target.parent, f"{STAGING_PREFIX}{step}")
    except OSError as error:
        raise _write_error(target, error) from error
    opened = Staging(scratch.path, step)
    try:
        with staged_files(scratch.path, background.images if background else None) as files:
            yield opened
        extra = encode(dict(opened.manifest_extra), where="manifest_extra")
    except BaseException as error:
        _discard(scratch)
        if isinstance(error, OSError):
            raise _write_error(target, error) from error
        raise
    finish = partial(_finish, scratch, target, step, extra, files, keep, upload_url)
    if background is None:
        finish()
    else:
        background.start(finish)


def _finish(
    scratch: ScratchDirectory,
    target: Path,
    step: int,
    extra: dict[str, Any],
    files: StagedFiles,
    keep: int | None,
    upload_url: str | None,
) -> None:
    """From files, or what is to become files, to a checkpoint that counts."""
    try:
        files.write()
        write_manifest(scratch.path, step=step, extra=extra, digests=files.digests)
        _land(scratch.path, target)
    except OSError as error:
        raise _write_error(target, error) from error
    finally:
        _discard(scratch)
    if keep is not None:
        retain(target.parents[1], keep)
    if upload_url is not None:
        upload(target, f"{upload_url.rstrip('/')}/{target.name}")


def _discard(scratch: ScratchDirectory) -> None:
    """Also after it has landed under another name: then only its lock is left."""
    shutil.rmtree(scratch.path, ignore_errors=True)
    scratch.close()


def _make_parent(run_dir: Path | str) -> None:
    parent = checkpoints_dir(run_dir)
    if not parent.is_dir():
        parent.mkdir(parents=True, exist_ok=True)
        sync(parent.parent)


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
    sync(target.parent)
    reach("checkpoint.after_rename")
    remember_verified(target)


def _write_error(target: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{target}: cannot be written ({type(error).__name__}: {error}); earlier checkpoints are "
        "untouched. Free disk space, lower checkpoint.keep or move run.output_dir"
    )
