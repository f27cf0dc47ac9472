"""Directories of a living process, which whoever starts next can tell from those of a dead one.

The kernel drops the lock of a killed process, so a held lock means alive, also across containers.
On a file system without locks nothing is ever taken for a leftover.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ScratchDirectory:
    """A fresh directory, locked until ``close``, wherever it is renamed to."""

    path: Path
    _file: int

    def close(self) -> None:
        """Give up the lock; the directory itself stays."""
        os.close(self._file)


def create_scratch(parent: Path, prefix: str) -> ScratchDirectory:
    """Make a directory named ``{prefix}-{pid}-…`` in ``parent``, for the owner's eyes only."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"{prefix}-{os.getpid()}-", dir=parent))
        try:
            file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        # Another process starting now may take the still unlocked directory for a leftover.
        if _lock(file) is not False and _is_at(file, path):
            return ScratchDirectory(path, file)
        os.close(file)


def remove_leftovers(parent: Path, prefix: str) -> list[Path]:
    """Remove the scratch directories of dead processes; returns what was removed."""
    removed = []
    for path in sorted(parent.glob(f"{prefix}*")):
        try:
            file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
        try:
            if _lock(file) and _is_at(file, path):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
        finally:
            os.close(file)
    return removed


def _lock(file: int) -> bool | None:
    """True: locked; False: somebody else holds it; None: this file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False
