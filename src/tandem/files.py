"""Files that survive a crash of the process or of the machine.

Directories that appear as a whole belong to ``checkpoint`` and ``models/directories``.
"""

from __future__ import annotations

import os
from pathlib import Path


def write_durably(path: Path | str, text: str) -> None:
    """Write ``text`` at once: a reader sees the old file or the whole new one, after a crash too.

    Raises:
        OSError: it cannot be written; the old file is as it was.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Make the content of a file, or the names inside a folder, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
