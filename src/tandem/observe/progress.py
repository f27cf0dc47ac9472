"""What a run shows while it works: a live line on a terminal, plain lines elsewhere.

Values are picked from the metrics of a step by name; computing them does not belong here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as LiveDisplay


class Shown(NamedTuple):
    """One number of the line: its label, patterns of the metric's name, and its format."""

    label: str
    names: tuple[str, ...]
    form: str


_LOSS = Shown(
    "loss",
    ("loss", "actor/loss", "sft/loss", "dpo/loss", "reward_model/loss", "train/loss"),
    "{:.4f}",
)
_PAIRS = Shown("accuracy", ("preference/accuracy", "reward_model/accuracy"), "{:.3f}")
_HELD_OUT = Shown("held-out", ("eval/heldout/policy_accuracy", "eval/heldout/accuracy"), "{:.3f}")
_SPEED = Shown("tok/s", ("perf/tokens_per_s",), "{:,.0f}")

SHOWN: dict[str, tuple[Shown, ...]] = {
    "sft": (_LOSS, Shown("lr", ("lr", "actor/lr", "sft/lr"), "{:.1e}"), _SPEED),
    "dpo": (_LOSS, _PAIRS, _HELD_OUT, _SPEED),
    "reward": (_LOSS, _PAIRS, _HELD_OUT, _SPEED),
    "rl": (
        Shown("reward", ("reward/mean",), "{:.3f}"),
        _LOSS,
        Shown("stale", ("staleness/max", "staleness/mean"), "{:.3g}"),
        Shown("accuracy", ("eval/*/avg@*",), "{:.3f}"),
        _SPEED,
    ),
}


class Progress:
    """Context manager around the steps of one stage.

    On a terminal the line is redrawn in place; elsewhere a line is printed for the first and last
    step and at most every ``every_s`` seconds. ``enabled=False`` shows nothing. ``start`` is how
    many steps were done before; None: all but one at the first ``update``.
    """

    def __init__(
        self,
        kind: Literal["sft", "dpo", "reward", "rl"],
        total: int,
        *,
        start: int | None = None,
        title: str | None = None,
        enabled: bool = True,
        console: Console | None = None,
        every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shown = SHOWN[kind]
        self._title = title or kind
        self._total, self._start, self._step = total, start, start or 0
        self._enabled = enabled
        self._console = console or Console()
        self._every_s, self._clock = every_s, clock
        self._latest: dict[str, str] = {}
        self._begun = clock()
        self._printed: float | None = None
        self._live = self._display() if enabled and self._console.is_terminal else None
        self._task = (
            self._live.add_task(self._title, total=total, completed=start or 0, values="", eta="")
            if self._live
            else None
        )

    def __enter__(self) -> Progress:
        self._begun = self._clock()
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Say that ``step`` steps are done, the last one with these metrics."""
        self._step = step
        if self._start is None:
            self._start = step - 1
        self._latest |= _picked(self._shown, metrics)
        values = "  ".join(f"{label} {text}" for label, text in self._latest.items())
        if self._live and self._task is not None:
            self._live.update(self._task, completed=step, values=values, eta=self.eta())
        elif self._enabled and self._is_due():
            self._printed = self._clock()
            line = f"{self._title} {step}/{self._total}  {values}  eta {self.eta()}"
            self._print(line)

    def note(self, text: str) -> None:
        """Print a line above the progress, e.g. the result of an evaluation."""
        if self._enabled:
            self._print(text)

    def eta(self) -> str:
        """Time left at the mean speed of this process so far, as ``m:ss``; ``?`` before a step."""
        done = 0 if self._start is None else self._step - self._start
        if done <= 0:
            return "?"
        left = (self._clock() - self._begun) / done * max(0, self._total - self._step)
        minutes, seconds = divmod(round(left), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _is_due(self) -> bool:
        if self._printed is None or self._step >= self._total:
            return True
        return self._clock() - self._printed >= self._every_s

    def _display(self) -> LiveDisplay:
        return LiveDisplay(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[values]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("eta {task.fields[eta]}"),
            console=self._console,
        )


def _picked(shown: tuple[Shown, ...], metrics: Mapping[str, Any]) -> dict[str, str]:
    picked = {}
    for item in shown:
        matching = [n for pattern in item.names for n in metrics if fnmatchcase(n, pattern)]
        for value in (metrics[name] for name in matching):
            if value is not None and not math.isnan(value):
                picked[item.label] = item.form.format(float(value))
                break
    return picked
