"""Progress: plain lines where there is no terminal, a live line where there is one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tandem.observe import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def screen(*, terminal: bool = False) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=120), file


def test_plain_lines_appear_first_last_and_every_interval() -> None:
    console, file = screen()
    clock = Clock()
    with Progress("rl", 10, console=console, every_s=5.0, clock=clock) as progress:
        for step in range(1, 11):
            clock.now += 2.0
            progress.update(step, {"reward/mean": step / 10})
    shown = [line.split()[1] for line in file.getvalue().splitlines()]
    assert shown == ["1/10", "4/10", "7/10", "10/10"]


def test_line_has_the_numbers_of_its_kind() -> None:
    console, file = screen()
    with Progress("rl", 2, console=console, clock=Clock()) as progress:
        progress.update(
            1,
            {
                "reward/mean": 0.5,
                "loss": 0.25,
                "perf/tokens_per_s": 1234.6,
                "staleness/max": 1,
                "lr": 1e-4,
            },
        )
    assert file.getvalue().splitlines() == [
        "rl 1/2  reward 0.500  loss 0.2500  stale 1  tok/s 1,235  eta 0:00"
    ]


def test_eta_is_the_mean_speed_of_this_process_times_what_is_left() -> None:
    clock = Clock()
    console, _ = screen()
    with Progress("sft", 100, start=40, console=console, clock=clock) as progress:
        assert progress.eta() == "?"
        clock.now = 30.0
        progress.update(50, {})
        assert progress.eta() == "2:30"
        clock.now = 4000.0
        progress.update(60, {})
        assert progress.eta() == "2:13:20"


def test_steps_of_an_earlier_process_do_not_count_into_the_speed() -> None:
    clock = Clock()
    console, _ = screen()
    with Progress("rl", 60, console=console, clock=clock) as progress:
        clock.now = 2.0
        progress.update(51, {})
        assert progress.eta() == "0:18"


def test_accuracy_is_shown_whatever_the_evaluation_is_called() -> None:
    console, file = screen()
    with Progress("rl", 9, console=console) as progress:
        progress.update(1, {"eval/heldout/avg@4": 0.25})
    assert "accuracy 0.250" in file.getvalue()


def test_missing_and_nan_metrics_keep_the_last_value() -> None:
    console, file = screen()
    clock = Clock()
    with Progress("sft", 3, console=console, every_s=0.0, clock=clock) as progress:
        progress.update(1, {"loss": float("nan")})
        progress.update(2, {"loss": 0.5})
        progress.update(3, {})
    assert [("loss 0.5000" in line) for line in file.getvalue().splitlines()] == [False, True, True]


@pytest.mark.parametrize("terminal", [False, True])
def test_disabled_shows_nothing(terminal: bool) -> None:
    console, file = screen(terminal=terminal)
    with Progress("sft", 2, console=console, enabled=False) as progress:
        progress.update(1, {"loss": 1.0})
        progress.note("hello")
    assert file.getvalue() == ""


def test_terminal_shows_bar_and_notes_above_it() -> None:
    console, file = screen(terminal=True)
    with Progress("sft", 2, title="warm-up", console=console) as progress:
        progress.note("accuracy [0.5]")
        progress.update(2, {"loss": 0.125})
    text = file.getvalue()
    assert "accuracy [0.5]" in text
    assert "warm-up" in text
    assert "2/2" in text
    assert "loss 0.1250" in text
