"""One run on several ranks, from joining the group to leaving it. What is said is ``group``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tandem.config import TrainConfig
from tandem.launch.failures import Failures
from tandem.launch.follower import Follower
from tandem.launch.group import Leader, Stoppable, installed
from tandem.launch.wire import Wire
from tandem.train import process_group
from tandem.train.registry import detect_device


def leading(config: TrainConfig, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run on the first rank, with the others behind its engines; returns what ``run`` returns."""
    with _joined(config) as (wire, failures):
        leader = Leader(wire, failures, timeout_s=config.parallel.timeout_s)
        try:
            with installed(leader):
                summary = run()
        except BaseException as error:
            leader.fail(error)
            raise
        leader.finish(summary)
        return summary


def follow(config: TrainConfig, stop: Stoppable) -> dict[str, Any]:
    """Follow the first rank until its run ends; returns its summary.

    Raises:
        TandemError: what the run ended with, or what failed here.
    """
    with _joined(config) as (wire, failures):
        return Follower(wire, failures, stop).run()


@contextmanager
def _joined(config: TrainConfig) -> Iterator[tuple[Wire, Failures]]:
    timeout_s = config.parallel.timeout_s
    device = (config.device or detect_device()).split(":")[0]
    is_member = process_group.join(device, None, timeout_s)
    try:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        wire = Wire(group)
        yield wire, Failures(wire.rank)
    finally:
        if is_member:
            process_group.leave()
