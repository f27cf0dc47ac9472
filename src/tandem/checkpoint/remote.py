"""Copies of checkpoints on any fsspec URL. The manifest goes last and comes first."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import fsspec

from tandem.checkpoint.manifest import (
    MANIFEST_NAME,
    CheckpointDir,
    read_manifest,
    verify,
)
from tandem.checkpoint.scratch import create_scratch, remove_leftovers
from tandem.config.urls import protocols
from tandem.errors import CheckpointError, ConfigError
from tandem.files import sync

_DOWNLOAD_PREFIX = ".download-"


def check_store(url: str) -> None:
    """Whether this installation can reach stores of this kind at all; connects to nothing.

    Raises:
        ConfigError: a package is missing.
    """
    for protocol in protocols(url):
        try:
            fsspec.get_filesystem_class(protocol)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"checkpoint.upload_url: got {url!r}, which needs another package: {error}"
            ) from error


def upload(checkpoint: Path | str, url: str) -> None:
    """Copy a checkpoint to ``url``, which names the copy itself. Idempotent.

    Another checkpoint that is already complete there is moved to ``{url}.superseded-K``.

    Raises:
        CheckpointError: the local checkpoint is damaged, or the store failed.
    """
    checkpoint = Path(checkpoint)
    manifest = (checkpoint / MANIFEST_NAME).read_bytes()
    files = read_manifest(checkpoint).files
    try:
        store, root = fsspec.url_to_fs(url)
        remote_manifest = f"{root}/{MANIFEST_NAME}"
        if store.exists(remote_manifest):
            if store.cat_file(remote_manifest) == manifest:
                return
            _move(store, root, _free_remote_name(store, root))
        for entry in files:
            remote = f"{root}/{entry.name}"
            store.makedirs(remote.rsplit("/", 1)[0], exist_ok=True)
            store.put_file(str(checkpoint / entry.name), remote)
        store.makedirs(root, exist_ok=True)
        store.pipe_file(remote_manifest, manifest)
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(
            f"upload to {url} failed ({type(error).__name__}: {error}); {checkpoint} is complete, "
            "check the URL and its credentials and upload it again"
        ) from error


def _move(store: Any, root: str, target: str) -> None:
    """Object stores have no folders to rename: file by file, the manifest last and gone first."""
    files = sorted(store.find(root), key=lambda file: file == f"{root}/{MANIFEST_NAME}")
    for file in files:
        moved = target + file.removeprefix(root)
        store.makedirs(moved.rsplit("/", 1)[0], exist_ok=True)
        store.cp_file(file, moved)
    for file in reversed(files):
        store.rm_file(file)


def _free_remote_name(store: Any, root: str) -> str:
    number = 1
    while store.exists(f"{root}.superseded-{number}"):
        number += 1
    return f"{root}.superseded-{number}"


def download(url: str, target: Path | str) -> CheckpointDir:
    """Copy a checkpoint from ``url`` to the new directory ``target`` and verify it.

    Raises:
        CheckpointError: there is none at ``url``, it is damaged, or ``target`` holds something
            else. Nothing is left at ``target`` then.
    """
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target.parent, _DOWNLOAD_PREFIX)
    scratch = create_scratch(target.parent, f"{_DOWNLOAD_PREFIX}{target.name}")
    try:
        _fetch(url, scratch.path)
        verify(scratch.path)
        if target.exists():
            return _same_or_refuse(target, scratch.path, url)
        scratch.path.chmod(0o755)
        scratch.path.rename(target)
        sync(target.parent)
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(
            f"download of {url} failed ({type(error).__name__}: {error}); check the URL, its "
            "credentials and the disk space"
        ) from error
    finally:
        shutil.rmtree(scratch.path, ignore_errors=True)
        scratch.close()
    return read_manifest(target)


def _fetch(url: str, directory: Path) -> None:
    store, root = fsspec.url_to_fs(url)
    store.get_file(f"{root}/{MANIFEST_NAME}", str(directory / MANIFEST_NAME))
    for entry in read_manifest(directory).files:
        local = directory / entry.name
        local.parent.mkdir(parents=True, exist_ok=True)
        store.get_file(f"{root}/{entry.name}", str(local))


def _same_or_refuse(target: Path, fetched: Path, url: str) -> CheckpointDir:
    manifest = (fetched / MANIFEST_NAME).read_bytes()
    local = target / MANIFEST_NAME
    if local.is_file() and local.read_bytes() == manifest:
        return verify(target)
    raise CheckpointError(
        f"{target}: exists and is not the checkpoint at {url}; choose another path"
    )
