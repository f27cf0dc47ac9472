"""The files of a checkpoint that is being written: at once, or when the block of its staging ends.

What the bytes of a file are belongs to ``image.py`` and ``state.py``; when a checkpoint counts, to
``save.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from tandem.checkpoint.image import FileImage, image_of, write_images


class StagedFiles:
    """Files under ``root``.

    With ``kept``, images by file name that outlive this checkpoint, tensors are only copied, into
    these, and all is written by ``write``.
    """

    def __init__(self, root: Path, kept: dict[str, FileImage] | None) -> None:
        self.root = root
        self.digests: dict[str, str] = {}
        """SHA-256 of the files of tensors that were written, by name."""
        self._kept = kept
        self._images: dict[Path, FileImage] = {}
        self._actions: list[Callable[[], None]] = []

    def add_tensors(
        self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
    ) -> None:
        if self._kept is None:
            self._write_images({path: image_of(tensors, metadata)})
            return
        name = self._name(path)
        self._kept[name] = image_of(tensors, metadata, self._kept.get(name))
        self._images[path] = self._kept[name]

    def add(self, action: Callable[[], None]) -> None:
        """``action`` writes another file."""
        if self._kept is None:
            action()
        else:
            self._actions.append(action)

    def write(self) -> None:
        """What was left for later."""
        self._write_images(self._images)
        for action in self._actions:
            action()

    def _write_images(self, images: Mapping[Path, FileImage]) -> None:
        for path, digest in write_images(images).items():
            self.digests[self._name(path)] = digest

    def _name(self, path: Path) -> str:
        return path.absolute().relative_to(self.root).as_posix()


_OPEN: dict[Path, StagedFiles] = {}


@contextmanager
def staged_files(root: Path, kept: dict[str, FileImage] | None) -> Iterator[StagedFiles]:
    """From now on what is written under ``root`` belongs to one checkpoint."""
    root = root.absolute()
    _OPEN[root] = files = StagedFiles(root, kept)
    try:
        yield files
    finally:
        del _OPEN[root]


def write_file(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """One safetensors file, as its staging wants it, or at once where there is none.

    Raises:
        CheckpointError: the file cannot be written, or the format has no word for a dtype.
    """
    files = _staged_at(path)
    if files is None:
        write_images({path: image_of(tensors, metadata)})
    else:
        files.add_tensors(path, tensors, metadata)


def write_other(path: Path, action: Callable[[], None]) -> None:
    """Let ``action`` write the file at ``path``, as its staging wants it."""
    files = _staged_at(path)
    if files is None:
        action()
    else:
        files.add(action)


def _staged_at(path: Path) -> StagedFiles | None:
    if not _OPEN:
        return None
    return next((_OPEN[parent] for parent in path.absolute().parents if parent in _OPEN), None)
