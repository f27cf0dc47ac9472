"""Experiment trackers behind one protocol, imported when asked for. The JSONL record is separate.

A tracker gets finite numbers only.
"""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from tandem.errors import ConfigError


class Tracker(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorboardTracker:
    """Event files under ``run_dir/tensorboard``."""

    def __init__(
        self, run_dir: Path, project: str, run_name: str, resume_step: int | None = None
    ) -> None:
        _require("tensorboard", "tensorboard")
        module = _require("torch.utils.tensorboard", "tensorboard")
        # purge_step hides what an interrupted run recorded past the checkpoint.
        self._writer = module.SummaryWriter(str(run_dir / "tensorboard"), purge_step=resume_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A Weights & Biases run, named by the run directory so that a resumed run goes on in it."""

    def __init__(
        self, run_dir: Path, project: str, run_name: str, resume_step: int | None = None
    ) -> None:
        wandb = _require("wandb", "wandb")
        self._run = wandb.init(
            project=project,
            name=run_name,
            id=run_id(run_dir, resume_step),
            resume="allow",
            dir=str(run_dir),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class TrackioTracker:
    """A Trackio run; Trackio keeps it locally."""

    def __init__(
        self, run_dir: Path, project: str, run_name: str, resume_step: int | None = None
    ) -> None:
        trackio = _require("trackio", "trackio")
        resume = "never" if resume_step is None else "allow"
        self._run = trackio.init(project=project, name=run_name, resume=resume)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[Path, str, str, int | None], Tracker]] = {
    "tensorboard": TensorboardTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
}


def open_tracker(
    name: str, run_dir: Path, project: str, run_name: str, resume_step: int | None = None
) -> Tracker:
    """Start the tracker called ``name``.

    Raises:
        ConfigError: there is no such tracker, or its package is not installed.
    """
    if name not in TRACKERS:
        raise ConfigError(
            f"tracking.trackers: got {name!r}, allowed: {', '.join(sorted(TRACKERS))}"
        )
    return TRACKERS[name](run_dir, project, run_name, resume_step)


def run_id(run_dir: Path, resume_step: int | None) -> str:
    """The tracker's own name of this run: kept beside the metrics, made anew by a fresh start."""
    path = run_dir / "tracker_id.txt"
    if resume_step is not None and path.exists():
        return path.read_text(encoding="utf-8").strip()
    identity = uuid.uuid4().hex[:12]
    path.write_text(f"{identity}\n", encoding="utf-8")
    return identity


def _require(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise ConfigError(
            f"tracking.trackers: {extra!r} needs a package that is not installed; "
            f"pip install 'tandem-rl[{extra}]'"
        ) from None
