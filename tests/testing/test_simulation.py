"""Whole asynchronous runs on a virtual clock: every rule holds, and a missing check is seen."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tandem.rollout import pipeline
from tandem.rollout.rows import Staleness, join_rows
from tandem.rollout.simulated import SimulatedRuntime, VirtualLoop
from tandem.rollout.staleness import StalenessLedger
from tandem.testing.simulation import Report, Simulation, scenario


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Publishing fails on purpose, and says so every time."""
    logger = logging.getLogger("tandem.trainers.publish")
    before, logger.disabled = logger.disabled, True
    yield
    logger.disabled = before


def run(seed: int = 0, **options: Any) -> Report:
    return Simulation(scenario(**{"num_events": 8_000, **options}), seed).run()


@pytest.mark.parametrize("policy", ["wait", "drop", "mask", "pace"])
def test_storms_break_no_rule(policy: str) -> None:
    reports = [run(seed, stale_policy=policy, kill_every=2_000) for seed in range(3)]
    assert sum(report.num_kills for report in reports) >= 6
    assert sum(report.num_steps for report in reports) >= 30
    assert all(report.violating_tokens == 0 < report.trained_tokens for report in reports)


def test_storms_reach_every_state_and_late_results() -> None:
    busy: dict[str, Any] = {"stale_policy": "drop", "max_staleness": 1, "duplicates": 0.6}
    busy |= {"failures": 0.05, "stubborn": 0.6}
    reports = [run(seed, **busy) for seed in range(2)]
    for state in ("consumed", "rejected", "failed", "stale", "superseded"):
        assert any(report.counts.get(state, 0) > 0 for report in reports), state
    assert any(report.num_late > 0 for report in reports)


def test_a_seed_is_one_run_event_by_event() -> None:
    first, again, other = run(5), run(5), run(6)
    assert first == again
    assert first.digest != other.digest


def test_a_synchronous_run_trains_on_nothing_old() -> None:
    report = run(1, max_staleness=0)
    assert report.num_steps > 5
    assert report.counts.get("stale", 0) == 0


def test_without_the_consumption_check_old_tokens_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mutation that shows what the storms can see."""

    def unchecked(episodes: Any, **_: Any) -> Any:
        return join_rows(episodes)[0], Staleness(0, 0.0, 0)

    monkeypatch.setattr(StalenessLedger, "expired", lambda self, version: [])
    monkeypatch.setattr(pipeline, "join_rows", unchecked)
    with pytest.raises(AssertionError, match=r"trained tokens are up to \d+ versions old"):
        run(0, stale_policy="drop", max_staleness=1, num_events=50_000, kill_every=None)


def test_a_place_that_is_not_given_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    consume = StalenessLedger.consume

    def leaky(self: StalenessLedger) -> list[int]:
        ids = consume(self)
        self._counts["running"] += 1  # type: ignore[index]
        self.submitted += 1
        return ids

    monkeypatch.setattr(StalenessLedger, "consume", leaky)
    monkeypatch.setattr(StalenessLedger, "_check", lambda self: None)
    with pytest.raises(AssertionError):
        run(0, kill_every=None)


# --- the virtual clock ----------------------------------------------------------------------------


def test_timers_run_in_the_order_of_their_time_and_the_clock_jumps() -> None:
    loop, seen = VirtualLoop(100.0), []
    for delay in (3.0, 1.0, 2.0):
        loop.call_later(delay, lambda d=delay: seen.append((d, loop.time())))
    loop.advance(until=102.5)
    assert seen == [(1.0, 101.0), (2.0, 102.0)]
    assert loop.time() == 102.5
    loop.advance(until=200.0)
    assert seen[-1] == (3.0, 103.0)


def test_what_a_callback_raises_ends_the_run() -> None:
    loop = VirtualLoop()
    loop.call_soon(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.advance(until=1.0)


def test_a_wait_ends_when_it_is_notified_or_out_of_time() -> None:
    runtime = SimulatedRuntime()

    async def tell() -> None:
        await asyncio.sleep(5.0)
        runtime.lock.notify_all()

    runtime.events.create_task(tell())
    assert not runtime.lock.wait(2.0)
    assert runtime.now() == 2.0
    assert runtime.lock.wait(10.0)
    assert runtime.now() == 5.0


def test_deadlines_of_asyncio_keep_the_virtual_time() -> None:
    runtime = SimulatedRuntime()

    async def impatient() -> float:
        try:
            async with asyncio.timeout(7.0):
                await asyncio.sleep(1e6)
        except TimeoutError:
            return runtime.now()
        return -1.0

    task = runtime.events.create_task(impatient())
    runtime.events.advance(1e7, task.done)
    assert task.result() == 7.0
