"""How long the stepping loop says that it had something to do."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tandem.inference.embedded.core import EmbeddedCore
from tandem.inference.embedded.loop import CoreLoop


class SetClock:
    """Stands still until it is moved; knows how often it was read."""

    def __init__(self) -> None:
        self._now = 100.0
        self._num_read = 0
        self._changed = threading.Condition()

    def __call__(self) -> float:
        with self._changed:
            self._num_read += 1
            self._changed.notify_all()
            return self._now

    def move(self, seconds: float) -> None:
        with self._changed:
            self._now += seconds

    def wait_read(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._num_read >= count, 10.0)


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def loop(core: EmbeddedCore, clock: SetClock) -> Iterator[CoreLoop]:
    def die(error: Exception) -> None:
        raise error

    made = CoreLoop(core, deliver=lambda done: None, die=die, clock=clock)
    made.start()
    clock.wait_read(1)
    yield made
    made.close()


def test_time_without_work_is_not_busy(loop: CoreLoop, clock: SetClock) -> None:
    clock.move(5.0)
    loop.call(lambda core: clock.move(2.0)).result(10.0)
    clock.wait_read(3)
    clock.move(7.0)
    loop.call(lambda core: clock.move(0.5)).result(10.0)
    clock.wait_read(5)
    clock.move(11.0)
    assert loop.stats()["busy_s"] == 2.5


def test_work_in_hand_counts_up_to_now(loop: CoreLoop, clock: SetClock) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def work(core: EmbeddedCore) -> None:
        has_begun.set()
        assert may_end.wait(10.0)

    clock.move(3.0)
    done = loop.call(work)
    assert has_begun.wait(10.0)
    assert loop.stats()["busy_s"] == 0.0
    clock.move(4.0)
    assert loop.stats()["busy_s"] == 4.0
    clock.move(1.0)
    may_end.set()
    done.result(10.0)
    assert loop.stats()["busy_s"] == 5.0
