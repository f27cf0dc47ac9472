"""Acting together: what the first rank decides, all know; a failure on one rank raises on all.

Without this a rank that raises leaves its peers waiting in their next collective. Everything here
must be called by all ranks of the engine.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from tandem.errors import EngineError, TandemError

if TYPE_CHECKING:
    from tandem.train.engine import TrainEngine

T = TypeVar("T")

MEETING_TIMEOUT_S = 300.0


def meet(engine: TrainEngine, call: str) -> None:
    """Wait until every rank makes this ``call``, for one that is often made by the first alone.

    Raises:
        EngineError: some rank did something else, or nothing, for ``MEETING_TIMEOUT_S`` or
            ``train.parallel.timeout_s``. The ranks are out of step then and can only end.
    """
    group = engine.parallelism_group
    if group is None:
        return
    limit_s = min(MEETING_TIMEOUT_S, engine.config.parallel.timeout_s)
    on_host = "gloo" in dist.get_backend_config(group)
    device = torch.device("cpu") if on_host else engine.device
    mark = torch.tensor([zlib.crc32(call.encode())], device=device)
    found = [torch.zeros_like(mark) for _ in range(dist.get_world_size(group))]
    # A wait that gives up leaves its collective pending; one with a timeout of its own ends.
    options = AllgatherOptions()
    options.timeout = timedelta(seconds=limit_s)
    try:
        group.allgather([found], [mark], options).wait()
    except RuntimeError as error:
        if "timed out" not in str(error).lower():
            raise
        raise EngineError(
            f"{call}: called on rank {engine.rank} and not on all {len(found)} ranks within "
            f"{limit_s:g} s; call it on every rank, of which the first alone writes"
        ) from error
    elsewhere = [rank for rank, value in enumerate(found) if not torch.equal(value, mark)]
    if elsewhere:
        raise EngineError(
            f"{call}: called on rank {engine.rank} while ranks {elsewhere} call something else; "
            "call it on every rank, of which the first alone writes"
        )


def on_all_ranks(engine: TrainEngine, action: Callable[[], T]) -> T:
    """Run ``action``, which must not communicate, on every rank; returns the own result.

    Raises:
        TandemError: the action failed on some rank, on all ranks alike.
    """
    result: T | None = None
    error: Exception | None = None
    try:
        result = action()
    except Exception as caught:  # told to the other ranks, then raised again
        error = caught
    report = None if error is None else (_kind(error), f"{type(error).__name__}: {error}")
    failures = engine._gather_over_all(report)
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise failure[0](f"rank {rank}: {failure[1]}")
    return result  # type: ignore[return-value]


def on_first_rank(engine: TrainEngine, action: Callable[[], T]) -> T | None:
    """Run ``action`` on the first rank only; None on the others."""
    return on_all_ranks(engine, lambda: action() if engine.is_first_rank else None)


def from_first_rank(engine: TrainEngine, value: T | None) -> T:
    """What the first rank has, on every rank."""
    box: list[Any] = [value]
    if engine.parallelism_group is not None:
        dist.broadcast_object_list(box, group=engine.parallelism_group, group_src=0)
    found: T = box[0]
    return found


@contextmanager
def opened_by_first_rank(
    engine: TrainEngine, make: Callable[[], AbstractContextManager[T]]
) -> Iterator[T | None]:
    """A context (a directory being written) that only the first rank enters and leaves.

    Errors inside it must be the same on all ranks (``on_all_ranks``).
    """
    context: Any = on_first_rank(engine, make)
    value = on_first_rank(engine, lambda: context.__enter__())
    try:
        yield value
    except BaseException as error:
        if engine.is_first_rank:
            context.__exit__(type(error), error, error.__traceback__)
        raise
    on_first_rank(engine, lambda: context.__exit__(None, None, None))


def _kind(error: Exception) -> type[TandemError]:
    return type(error) if isinstance(error, TandemError) else EngineError
