"""Saving while training goes on: tensors are copied into kept buffers, a thread does the rest.

What is written and when it counts belongs to ``save.py``; this is only who does it and when.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class Deferral:
    """Files under ``root`` that are written when the block of their staging has ended."""

    def __init__(self, root: Path, buffers: dict[str, dict[str, Tensor]]) -> None:
        self.root = root
        self._buffers = buffers
        self._actions: list[Callable[[], None]] = []

    def later(self, action: Callable[[], None]) -> None:
        self._actions.append(action)

    def copied(self, path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as they are now, in memory that is kept for the next save of this file."""
        file = path.absolute().relative_to(self.root).as_posix()
        kept = self._buffers.get(file, {})
        copies = {name: _buffer(kept.get(name), tensor) for name, tensor in tensors.items()}
        self._buffers[file] = copies
        with torch.no_grad():
            for name, tensor in tensors.items():
                copies[name].copy_(tensor)
        return copies

    def write(self) -> None:
        for action in self._actions:
            action()


_OPEN: dict[Path, Deferral] = {}


def deferral_at(path: Path) -> Deferral | None:
    """The deferral that a file at ``path`` falls under; None: it is written at once."""
    if not _OPEN:
        return None
    return next((_OPEN[parent] for parent in path.absolute().parents if parent in _OPEN), None)


class BackgroundWriter:
    """Finishes checkpoints in a thread, one at a time.

    A save that failed raises where its owner comes by next: at the next save, in ``wait``, or when
    the ``with`` block of the writer ends, which waits too.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, dict[str, Tensor]] = {}
        self._pending: Future[None] | None = None

    def __enter__(self) -> BackgroundWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except Exception as failure:
            if error is None:
                raise
            # The run ends for another reason already; that one is reported by its owner.
            logger.error("the last checkpoint was not saved: %s", failure)

    @property
    def is_busy(self) -> bool:
        return self._pending is not None and not self._pending.done()

    def wait(self) -> None:
        """Until the save that was started last is over; raises what went wrong with it, once."""
        pending = self._pending
        if pending is not None:
            # Kept until it is over, so that an interrupted wait can be repeated.
            pending.exception()
            self._pending = None
            pending.result()

    def start(self, work: Callable[[], None]) -> None:
        """Run ``work`` in a thread; the one before must be over (``wait``)."""
        assert self._pending is None
        self._pending = future = Future[None]()
        threading.Thread(target=_run, args=(work, future), name="checkpoint", daemon=True).start()

    @contextmanager
    def deferring(self, root: Path) -> Iterator[Deferral]:
        """From now on tensors and state of files under ``root`` are copied and not yet written."""
        root = root.absolute()
        _OPEN[root] = deferral = Deferral(root, self._buffers)
        try:
            yield deferral
        finally:
            del _OPEN[root]


def _run(work: Callable[[], None], future: Future[None]) -> None:
    try:
        work()
    except BaseException as error:  # a thread's failure is its owner's to raise
        future.set_exception(error)
    else:
        future.set_result(None)


def _buffer(kept: Tensor | None, like: Tensor) -> Tensor:
    if kept is not None and kept.shape == like.shape and kept.dtype == like.dtype:
        return kept
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.device.type == "cuda")
