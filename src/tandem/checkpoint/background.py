"""Saving while training goes on: tensors are copied into kept buffers, a thread does the rest.

What is written and when it counts belongs to ``save.py``; this is only who does it and when.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType

from tandem.checkpoint.image import FileImage

logger = logging.getLogger(__name__)


class BackgroundWriter:
    """Finishes checkpoints in a thread, one at a time.

    A save that failed raises where its owner comes by next: at the next save, in ``wait``, or when
    the ``with`` block of the writer ends, which waits too.
    """

    def __init__(self) -> None:
        self.images: dict[str, FileImage] = {}
        """Memory of the files that was copied into, kept for the next save."""
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


def _run(work: Callable[[], None], future: Future[None]) -> None:
    try:
        work()
    except BaseException as error:  # a thread's failure is its owner's to raise
        future.set_exception(error)
    else:
        future.set_result(None)
