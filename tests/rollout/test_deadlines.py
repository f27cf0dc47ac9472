"""One timer for the deadlines of all attempts, on a virtual clock."""

from __future__ import annotations

import pytest

from tandem.rollout.deadlines import Deadlines
from tandem.rollout.runs import Run
from tandem.rollout.simulated import SimulatedRuntime
from tandem.rollout.workflow import Episode
from tests.rollout.doubles import OneRow

WORKFLOW = OneRow()


class Bed:
    """Attempts with the times at which they expired."""

    def __init__(self) -> None:
        self.runtime = SimulatedRuntime()
        self.runtime.start(self._broken)
        self.expired: list[tuple[int, float]] = []
        self.deadlines = Deadlines(
            self.runtime, lambda run: self.expired.append((run.episode_id, self.runtime.now()))
        )

    def start(self, number: int, timeout_s: float) -> Run:
        episode = Episode({}, episode_id=number, attempt=0, uid=f"{number}.0")
        run = Run(episode, WORKFLOW, number, timeout_s, self.runtime.now())
        run.started_at = self.runtime.now()
        with self.runtime.lock:
            self.deadlines.add(run)
        return run

    def until(self, time_s: float) -> None:
        self.runtime.loop.advance(time_s)  # type: ignore[attr-defined]

    def _broken(self, error: BaseException) -> None:
        raise error


@pytest.fixture
def bed() -> Bed:
    return Bed()


def test_each_attempt_expires_when_its_own_time_is_over(bed: Bed) -> None:
    bed.start(0, 10.0)
    bed.start(1, 3.0)
    bed.until(2.0)
    bed.start(2, 10.0)
    bed.start(3, 0.5)
    bed.until(100.0)
    assert bed.expired == [(3, 2.5), (1, 3.0), (0, 10.0), (2, 12.0)]


def test_an_attempt_that_ended_does_not_expire_and_the_next_still_does(bed: Bed) -> None:
    first = bed.start(0, 5.0)
    bed.until(1.0)
    bed.start(1, 5.0)
    with bed.runtime.lock:
        bed.deadlines.discard(first)
        bed.deadlines.discard(first)
    bed.until(100.0)
    assert bed.expired == [(1, 6.0)]


def test_attempts_that_are_due_together_all_expire(bed: Bed) -> None:
    for number in range(4):
        bed.start(number, 5.0 if number % 2 else 4.0)
    bed.until(4.5)
    assert bed.expired == [(0, 4.0), (2, 4.0)]
    bed.until(5.0)
    assert bed.expired[2:] == [(1, 5.0), (3, 5.0)]


def test_after_clearing_nothing_expires_and_new_attempts_do(bed: Bed) -> None:
    bed.start(0, 5.0)
    bed.deadlines.clear()
    bed.until(1.0)
    bed.start(1, 5.0)
    bed.until(100.0)
    assert bed.expired == [(1, 6.0)]
