"""Shares of time in which trainer or generator had nothing to do."""

from __future__ import annotations

import dataclasses

import pytest

from tandem.trainers.bubble import Bubble


def test_shares_of_a_step_are_parts_of_its_time() -> None:
    metrics = Bubble().add(step_s=4.0, wait_s=1.0, busy_s=3.5)
    assert metrics == {"perf/trainer_wait_share": 0.25, "perf/generator_idle_share": 0.125}


def test_shares_of_a_run_weigh_steps_by_their_time() -> None:
    bubble = Bubble()
    bubble.add(step_s=1.0, wait_s=1.0, busy_s=0.5)
    bubble.add(step_s=3.0, wait_s=0.0, busy_s=3.0)
    assert bubble.trainer_wait_share == pytest.approx(1.0 / 4.0)
    assert bubble.generator_idle_share == pytest.approx(0.5 / 4.0)


def test_generator_that_does_not_tell_has_no_share() -> None:
    bubble = Bubble()
    assert bubble.add(step_s=2.0, wait_s=1.0, busy_s=None) == {"perf/trainer_wait_share": 0.5}
    assert bubble.generator_idle_share is None
    bubble.add(step_s=2.0, wait_s=0.0, busy_s=1.0)
    assert bubble.generator_idle_share == 0.5
    assert bubble.trainer_wait_share == 0.25


def test_generator_busy_for_longer_than_the_step_was_not_idle() -> None:
    """Its time is read a moment before the step begins and a moment after it ends."""
    bubble = Bubble()
    assert bubble.add(step_s=1.0, wait_s=0.0, busy_s=1.01)["perf/generator_idle_share"] == 0.0
    assert bubble.generator_idle_share == 0.0


def test_run_without_steps_has_no_shares() -> None:
    assert Bubble().trainer_wait_share is None
    assert Bubble().generator_idle_share is None


def test_sums_go_on_after_a_resume() -> None:
    bubble = Bubble()
    bubble.add(step_s=1.0, wait_s=1.0, busy_s=1.0)
    resumed = Bubble(**dataclasses.asdict(bubble))
    resumed.add(step_s=1.0, wait_s=0.0, busy_s=0.0)
    assert resumed.trainer_wait_share == 0.5
    assert resumed.generator_idle_share == 0.5
