"""Times of functions that take turns, so that a change of the machine's load meets all of them.

Wall time is what counts on an idle machine; the process's own time is less disturbed by others, and
means nothing where several threads or processes work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

Timing = dict[str, float]
Pair = tuple[float, float]
"""Wall and processor time of one call, in milliseconds."""


def timed(function: Callable[[], Any]) -> Pair:
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    return 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)


def take_turns(functions: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[Pair]]:
    """One call of each to warm up, then ``repeats`` rounds of all."""
    for function in functions.values():
        function()
    times: dict[str, list[Pair]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            times[name].append(timed(function))
    return times


def measure(function: Callable[[], Any], repeats: int) -> Timing:
    return summary(take_turns({"it": function}, repeats)["it"])


def summary(times: list[Pair]) -> Timing:
    walls, cpus = zip(*times, strict=True)
    return {
        "min_ms": round(min(walls), 3),
        "median_ms": round(statistics.median(walls), 3),
        "cpu_ms": round(min(cpus), 3),
    }


def ratio(first: list[Pair], second: list[Pair]) -> dict[str, float]:
    """How long ``first`` takes of ``second``: of the best calls, and the median over the rounds."""
    rounds = list(zip(first, second, strict=True))
    return {
        "of_minima": round(min(a[0] for a in first) / min(b[0] for b in second), 3),
        "median": round(statistics.median(a[0] / b[0] for a, b in rounds), 3),
        "cpu_median": round(statistics.median(a[1] / b[1] for a, b in rounds), 3),
    }
