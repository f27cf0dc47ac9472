"""The checkpoints of one run, ``RUN/checkpoints/step_N``: which there are, which stay.

Writing one belongs to ``save.py``.
"""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

from tandem.checkpoint.manifest import CheckpointDir, read_manifest, verify
from tandem.checkpoint.scratch import remove_leftovers
from tandem.errors import CheckpointError
from tandem.files import sync
from tandem.observe.moments import reach

logger = logging.getLogger(__name__)

STAGING_PREFIX = ".staging-step_"
_REMOVING_PREFIX = ".removing-"

_Signature = tuple[tuple[str, int, int], ...]
_VERIFIED: dict[Path, _Signature] = {}
"""Sizes and times of checkpoints that this process has verified, so that retention does not read
every byte of every old checkpoint at each save."""


def checkpoints_dir(run_dir: Path | str) -> Path:
    return Path(run_dir) / "checkpoints"


def step_dir(run_dir: Path | str, step: int) -> Path:
    return checkpoints_dir(run_dir) / f"step_{step}"


def list_steps(run_dir: Path | str) -> list[int]:
    """Steps of all checkpoint directories of a run, complete or not, ascending."""
    found = (re.fullmatch(r"step_(\d+)", p.name) for p in checkpoints_dir(run_dir).glob("step_*"))
    return sorted(int(match[1]) for match in found if match)


def latest(run_dir: Path | str) -> CheckpointDir | None:
    """The newest checkpoint that verifies; None if the run has none.

    What is skipped is logged as a warning by name, and unfinished ones of dead processes are
    removed.

    Raises:
        CheckpointError: there are checkpoints and none verifies.
    """
    remove_unfinished(run_dir)
    problems: list[str] = []
    for step in reversed(list_steps(run_dir)):
        path = step_dir(run_dir, step)
        try:
            checkpoint = verify_cached(path, use_cache=False)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            logger.warning("checkpoint skipped: %s", problem)
        return checkpoint
    if problems:
        raise CheckpointError(
            f"{checkpoints_dir(run_dir)}: no checkpoint can be trusted: {'; '.join(problems)}. "
            "Restore one from a copy, or start a new run under another name"
        )
    return None


def verify_cached(path: Path, *, use_cache: bool = True) -> CheckpointDir:
    """``verify``, which with ``use_cache`` trusts files unchanged since this process read them."""
    checkpoint = read_manifest(path)
    try:
        signature = _signature(checkpoint)
    except FileNotFoundError:
        return verify(path)
    if not use_cache or _VERIFIED.get(path) != signature:
        _VERIFIED.pop(path, None)
        checkpoint = verify(path)
        _VERIFIED[path] = signature
    return checkpoint


def remember_verified(path: Path) -> None:
    """Take note of a checkpoint whose digests this process has just made from its files."""
    _VERIFIED[path] = _signature(read_manifest(path))


def _signature(checkpoint: CheckpointDir) -> _Signature:
    stats = [(entry.name, (checkpoint.path / entry.name).stat()) for entry in checkpoint.files]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def remove_unfinished(run_dir: Path | str) -> None:
    """Remove what processes that died in the middle of a save or a removal left behind."""
    parent = checkpoints_dir(run_dir)
    for path in remove_leftovers(parent, STAGING_PREFIX):
        step = path.name.removeprefix(".staging-").split("-")[0]
        logger.warning("checkpoint skipped: %s was never finished (its process died)", step)
    for path in parent.glob(f"{_REMOVING_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


def retain(run_dir: Path | str, keep: int) -> None:
    """Remove all but the newest ``keep`` valid checkpoints found on disk, whoever wrote them.

    Damaged, quarantined and superseded ones are left for a person to look at.
    """
    num_valid = 0
    for step in reversed(list_steps(run_dir)):
        path = step_dir(run_dir, step)
        try:
            verify_cached(path)
        except CheckpointError as error:
            logger.warning("checkpoint left where it is and not counted: %s", error)
            continue
        num_valid += 1
        if num_valid > keep:
            _remove(path)


def _remove(path: Path) -> None:
    """Hide first: a removal cut short must not look like a damaged checkpoint."""
    hidden = free_name(path.parent / f"{_REMOVING_PREFIX}{path.name}")
    path.rename(hidden)
    _VERIFIED.pop(path, None)
    reach("checkpoint.retention")
    shutil.rmtree(hidden)


def quarantine(path: Path) -> Path:
    """Rename a damaged checkpoint to ``step_N.invalid-K``."""
    target = free_name(Path(f"{path}.invalid"), first=1)
    path.rename(target)
    logger.warning("checkpoint %s does not verify; renamed to %s", path, target.name)
    return target


def supersede_newer(run_dir: Path | str, step: int) -> list[Path]:
    """Rename checkpoints newer than ``step`` to ``step_N.superseded``; returns the new paths.

    Call it before resuming from ``step``, so that a restart does not go back to the old future.
    """
    renamed = []
    for newer in reversed(list_steps(run_dir)):
        if newer > step:
            path = step_dir(run_dir, newer)
            target = free_name(Path(f"{path}.superseded"))
            path.rename(target)
            renamed.append(target)
    if renamed:
        sync(checkpoints_dir(run_dir))
    return renamed


def free_name(path: Path, *, first: int = 0) -> Path:
    """``path``, or the first of ``path-K`` that is free; with ``first`` always a number."""
    number = first
    while True:
        candidate = Path(f"{path}-{number}") if number else path
        if not candidate.exists():
            return candidate
        number += 1
