"""A thread that makes published weights ready beside the running steps; at a token border they are
only exchanged for those that serve. What a set of weights is, is in ``weights.py``.
"""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import torch

from tandem.errors import EngineError
from tandem.inference.embedded.core import EmbeddedCore
from tandem.inference.embedded.loop import CoreLoop
from tandem.inference.embedded.weights import WeightSet
from tandem.weights import Published

NICENESS = 5
"""How much nicer than the process the filling thread is (Linux): of a core that steps, too, it gets
a quarter."""


class WeightFiller:
    """Commits published weights to the core of ``loop``, one version after the other."""

    def __init__(self, core: EmbeddedCore, loop: CoreLoop) -> None:
        self._core = core
        self._loop = loop
        self._is_closing = threading.Event()
        self._thread = ThreadPoolExecutor(1, "tandem-weights")
        self._thread_id: int | None = None

    def commit(self, published: Published) -> Future[None]:
        """Returns at once. The future ends when the version serves, or with the error that left the
        old one serving; until the token border it can be cancelled.

        Raises:
            EngineError: closed.
        """
        self._refuse_if_closing()
        committed: Future[None] = Future()
        self._thread.submit(self._fill, published, committed)
        return committed

    def close(self) -> None:
        """End the update in hand, before its next tensor, and those that wait."""
        self._is_closing.set()
        self._thread.shutdown(wait=threading.get_ident() != self._thread_id)

    def _fill(self, published: Published, committed: Future[None]) -> None:
        self._thread_id = threading.get_ident()
        try:
            _work_aside()
            old = self._exchange(published, committed)
        except Exception as error:  # everything that was wrong with it is the update's outcome
            if committed.running() or committed.set_running_or_notify_cancel():
                committed.set_exception(error)
            return
        if old is not None:
            old.release()
            committed.set_result(None)

    def _exchange(self, published: Published, committed: Future[None]) -> WeightSet | None:
        """What served before, or None when the update was called off."""

        def heed() -> None:
            self._refuse_if_closing()
            if committed.cancelled():
                raise CancelledError

        new = self._core.weights.fill(published, heed)
        try:
            old = self._loop.call(
                lambda core: (
                    core.exchange(new) if committed.set_running_or_notify_cancel() else None
                )
            ).result()
        except Exception:
            new.release()
            raise
        if old is None:
            new.release()
        return old

    def _refuse_if_closing(self) -> None:
        if self._is_closing.is_set():
            raise EngineError("the generation backend is closed; start a new one")


def _work_aside() -> None:
    """Leave the cores to the steps: OpenMP keeps threads for each of its callers, and once they are
    more than the cores it lets those of the steps sleep between any two operations."""
    if sys.platform == "linux":
        own = os.getpriority(os.PRIO_PROCESS, os.getpid())
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), own + NICENESS)
    threads = torch.get_num_threads()
    if threads > 1:
        torch.set_num_threads(1)
        # That was this thread's own number and the one that threads to come begin with.
        reset = threading.Thread(target=torch.set_num_threads, args=(threads,))
        reset.start()
        reset.join()
