"""Why a run on several ranks ends: said to ranks whose next collective would only break.

A rank that fails alone leaves its peers in a collective that it never joins; it writes its reason
into the store where the ranks met, and ends. Its peers' collectives break then, and they read it.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from tandem import errors
from tandem.errors import EngineError, TandemError

KEY = "tandem/failure"
PATIENCE = timedelta(seconds=5)
"""How long a broken collective waits for the reason; a rank that was killed gives none."""


def describe(error: BaseException) -> dict[str, str]:
    """An error as JSON."""
    kind = type(error).__name__ if isinstance(error, TandemError) else "EngineError"
    text = str(error) if isinstance(error, TandemError) else f"{type(error).__name__}: {error}"
    return {"kind": kind, "message": text}


def rebuilt(description: dict[str, Any], rank: int) -> TandemError:
    """The error of ``rank``, of its own kind."""
    found = getattr(errors, description["kind"], None)
    kind = found if isinstance(found, type) and issubclass(found, TandemError) else EngineError
    return kind(f"rank {rank}: {description['message']}")


class Failures:
    """The place for the reason of this run's end; the first one stays."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._store: Store = _get_default_store()

    def report(self, error: BaseException) -> None:
        """Leave the reason for the other ranks. Without a store any more there is none to tell."""
        reason = json.dumps({"rank": self._rank, **describe(error)})
        try:
            self._store.compare_set(KEY, "", reason)
        except dist.DistError:
            return

    def explain(self, error: BaseException) -> BaseException:
        """``error``, or if it says that a collective broke: why."""
        broke = isinstance(error, dist.DistError) or "gloo" in str(error)
        if isinstance(error, TandemError) or not isinstance(error, RuntimeError) or not broke:
            return error
        reason = self._reason()
        if reason is not None and reason["rank"] != self._rank:
            return rebuilt(reason, reason["rank"])
        first_line = str(error).splitlines()[0]
        return EngineError(
            f"rank {self._rank} has lost another rank ({first_line}); it was killed, or did not "
            "answer within train.parallel.timeout_s. Go on with --resume from the last checkpoint"
        )

    def _reason(self) -> dict[str, Any] | None:
        try:
            self._store.wait([KEY], PATIENCE)
            found: dict[str, Any] = json.loads(self._store.get(KEY))
        except dist.DistError:
            return None
        return found
