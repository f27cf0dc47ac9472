"""The commit point of a checkpoint: a list of its files with sizes and digests, and its own digest.

Finding, keeping and moving checkpoints belongs to ``directory.py``, ``save.py``, ``remote.py``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from tandem.checkpoint.state import decode
from tandem.errors import CheckpointError
from tandem.files import sync, write_durably

MANIFEST_NAME = "manifest.json"
_FORMAT = 1
_CHUNK = 1 << 22
"""Bytes read at a time: a training thread gets the interpreter back only between two of them."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint, named relative to it with forward slashes."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class CheckpointDir:
    """A checkpoint whose files are those of its manifest. ``extra`` is ``manifest_extra``."""

    path: Path
    step: int
    files: tuple[FileEntry, ...]
    extra: Mapping[str, Any]


def write_manifest(
    directory: Path, *, step: int, extra: Mapping[str, Any], digests: Mapping[str, str]
) -> None:
    """Make every file of ``directory`` durable, then describe them all in a durable manifest.

    ``extra`` is plain JSON, as ``encode`` makes it. ``digests`` are those of files, by name, whose
    writer has made them; the others are read.
    """
    paths = list(_walk(directory))
    folders = [Path(folder) for folder, _, _ in os.walk(directory)]
    # The disk and the processor take about as long as each other, so they work at the same time.
    with ThreadPoolExecutor(1) as disk:
        durable = [disk.submit(sync, path) for path in (*paths, *folders)]
        files = [_describe(path, path.relative_to(directory).as_posix(), digests) for path in paths]
        for done in durable:
            done.result()
    record = {"format": _FORMAT, "step": step, "files": files, "extra": extra}
    record["sha256"] = _digest(record)
    write_durably(directory / MANIFEST_NAME, json.dumps(record, indent=1, allow_nan=False))


def _describe(path: Path, name: str, digests: Mapping[str, str]) -> dict[str, Any]:
    digest = digests.get(name) or sha256_file(path)
    return {"name": name, "size": path.stat().st_size, "sha256": digest}


def _walk(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise CheckpointError(
                f"{path}: is a link or a special file, allowed: files and folders; write a copy"
            )
        if path.is_file():
            yield path


def verify(path: Path | str) -> CheckpointDir:
    """Read every file of a checkpoint and compare sizes and digests.

    Raises:
        CheckpointError: says what is missing or damaged.
    """
    path = Path(path)
    checkpoint = read_manifest(path)
    for entry in checkpoint.files:
        file = path / entry.name
        if not file.is_file():
            raise CheckpointError(f"{path}: {entry.name} is missing")
        size = file.stat().st_size
        if size != entry.size:
            raise CheckpointError(f"{path}: {entry.name} has {size} bytes, written: {entry.size}")
        if sha256_file(file) != entry.sha256:
            raise CheckpointError(f"{path}: {entry.name} is damaged (sha256 differs)")
    return checkpoint


def read_manifest(path: Path) -> CheckpointDir:
    """The manifest of a checkpoint, itself verified; the files are not looked at.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    try:
        record = json.loads((path / MANIFEST_NAME).read_text(encoding="utf-8"))
        if record.pop("sha256") != _digest(record):
            raise ValueError("sha256 differs")
        if record["format"] != _FORMAT:
            raise ValueError(f"format {record['format']!r}, allowed: {_FORMAT}")
        files = tuple(FileEntry(**entry) for entry in record["files"])
        for entry in files:
            _check_name(entry.name)
        return CheckpointDir(path, int(record["step"]), files, decode(record["extra"]))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: has no {MANIFEST_NAME}, so it was never finished"
        ) from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: {MANIFEST_NAME} is damaged ({type(error).__name__}: {error})"
        ) from error


def _check_name(name: str) -> None:
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts:
        raise ValueError(f"file name {name!r} leads out of the checkpoint")


def _digest(record: Mapping[str, Any]) -> str:
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_file(path: Path) -> str:
    digest, chunk = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            digest.update(chunk[:count])
    return digest.hexdigest()
