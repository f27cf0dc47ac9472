"""The record of a run: ``metrics.jsonl`` and its averages. Computing a metric does not belong here.

One JSON object a step: ``step``, ``time`` (seconds since the epoch), then the metrics. A metric
that is None or NaN had no value at that step and is absent. An infinite one cannot be written in
JSON: it is absent too, with a warning the first time for each name.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.errors import ConfigError, DataError
from tandem.observe.trackers import Tracker, open_tracker

METRICS_FILE = "metrics.jsonl"

_log = logging.getLogger(__name__)


class MetricsLogger:
    """Writes the metrics of every step to ``run_dir/metrics.jsonl`` and to the trackers.

    ``resume_step`` is the first step that will be logged again: recorded lines from there on, and
    a last line that a killed process left torn, are cut off, so that no step appears twice.

    Raises:
        ConfigError: the run directory has metrics and ``resume_step`` is None; or a tracker's
            package is not installed.
    """

    def __init__(
        self,
        run_dir: str | Path,
        trackers: Sequence[str] = (),
        project: str = "tandem",
        run_name: str = "run",
        resume_step: int | None = None,
        *,
        file_name: str = METRICS_FILE,
    ) -> None:
        self.path = Path(run_dir) / file_name
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._last_step = _prepare(self.path, resume_step)
        self._infinite: set[str] = set()
        self._trackers: list[Tracker] = []
        self._file = self.path.open("a", encoding="utf-8")
        try:
            for name in trackers:
                self._trackers.append(
                    open_tracker(name, self.path.parent, project, run_name, resume_step)
                )
        except BaseException:
            self.close()
            raise

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record one step; values are numbers or what ``float`` accepts (0-d tensors), or None.

        Raises:
            ValueError: ``step`` is not after the last one.
        """
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"step: got {step}, allowed: > {self._last_step}, the last one logged")
        values = self._finite(metrics)
        self._file.write(json.dumps({"step": step, "time": time.time(), **values}) + "\n")
        self._file.flush()
        self._last_step = step
        for tracker in self._trackers:
            tracker.log(step, values)

    def close(self) -> None:
        """Close the file and the trackers. Idempotent."""
        self._file.close()
        while self._trackers:
            self._trackers.pop().close()

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _finite(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, raw in metrics.items():
            if raw is None:
                continue
            value = float(raw)
            if math.isfinite(value):
                whole = isinstance(raw, int) and not isinstance(raw, bool)
                values[name] = int(raw) if whole else value
            elif not math.isnan(value) and name not in self._infinite:
                self._infinite.add(name)
                _log.warning("metric %r is %s; infinite values are not recorded", name, value)
        return values


def read_metrics(run_dir: str | Path, *, file_name: str = METRICS_FILE) -> list[dict[str, Any]]:
    """The recorded steps of a run, in order; empty if there are none yet.

    Raises:
        DataError: a line other than a torn last one is not a JSON object.
    """
    path = Path(run_dir) / file_name
    return _parse(path) if path.exists() else []


def nan_mean(values: Iterable[float | None]) -> float | None:
    """Mean of the values that are there (not None, not NaN); None if none is."""
    present = [float(value) for value in values if value is not None and value == value]
    return math.fsum(present) / len(present) if present else None


def mean_metrics(rows: Iterable[Mapping[str, float | None]]) -> dict[str, float]:
    """``nan_mean`` of every name over the rows that have it; names without a value are absent."""
    columns: dict[str, list[float | None]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    means = {name: nan_mean(values) for name, values in columns.items()}
    return {name: value for name, value in means.items() if value is not None}


def _prepare(path: Path, resume_step: int | None) -> int | None:
    """Make the file ready for appending; returns the last step that it keeps."""
    if not path.exists() or path.stat().st_size == 0:
        return None
    if resume_step is None:
        raise ConfigError(
            f"{str(path)!r} exists: the run has metrics already; go on with --resume, or choose "
            "another run.name"
        )
    kept = [row for row in _parse(path) if row["step"] < resume_step]
    replacement = path.with_name(f"{path.name}.tmp")
    with replacement.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in kept)
        file.flush()
        os.fsync(file.fileno())
    replacement.replace(path)
    return int(kept[-1]["step"]) if kept else None


def _parse(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            rows.append({**row, "step": int(row["step"])})
        except (ValueError, TypeError, KeyError):
            if number == len(lines) and not line.endswith("\n"):
                break
            raise DataError(
                f"{path} line {number}: got {line.strip()[:60]!r}, expected a JSON object with "
                "'step'; repair or remove the line"
            ) from None
    return rows
