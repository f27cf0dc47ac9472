"""Deterministic replay: training again on the batches that a run recorded, value by value.

Nothing is generated: rows, their order and the batches they were in come from the trajectory store.
The training itself is that of ``rl_learner``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tensordict import TensorDict

from tandem.checkpoint import list_steps
from tandem.checkpoint.directory import step_dir
from tandem.config import RLConfig, load_config
from tandem.errors import ConfigError, ReplayDiverged, StoreError
from tandem.models.loading import resolve_model
from tandem.rollout.encoding import unpack_rows
from tandem.rollout.rows import check_rows, join_rows
from tandem.store import STORE_FILE, Event, SqliteStore, TrajectoryStore
from tandem.trainers.rl_learner import Learner, open_learner
from tandem.trainers.run import seed_generators, set_threads
from tandem.types import WeightUpdateMeta
from tandem.weights import last_published, release

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """Steps ``first`` to ``last`` were computed again and gave the same ``num_values`` values."""

    first: int
    last: int
    num_values: int


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One training step of the schedule: episode, attempt and key of each member, in order."""

    members: tuple[tuple[int, int, int], ...]
    metrics: Mapping[str, float]
    weights: str
    total_steps: int


def run_replay(
    run_dir: Path | str,
    *,
    from_step: int | None = None,
    on_step: Callable[[int], None] = lambda step: None,
) -> ReplayReport:
    """Train again from a checkpoint of a run on the schedule that it recorded, in this process.

    From the oldest step possible unless ``from_step`` names one. ``on_step`` is called with every
    step that came out the same: metrics and the digest of the weights, bit for bit.

    Raises:
        ReplayDiverged: at the first value that differs, with both.
        ConfigError: no run of reinforcement learning there, or no state of ``from_step``.
        StoreError: the schedule or its rows are not (or no longer) in the store.
    """
    run_dir = Path(run_dir)
    config = _config_of(run_dir)
    store = SqliteStore(run_dir / STORE_FILE, read_only=True)
    try:
        schedule = read_schedule(store)
        first = _first_step(run_dir, schedule, from_step)
        last = _last_step(schedule, first)
        num_values = 0
        with _training(config, run_dir, first, schedule[first].total_steps) as replay:
            for step in range(first, last + 1):
                recorded = schedule[step]
                computed = replay.step(step, _batch(store, recorded, step, config))
                num_values += _compare(step, recorded, *computed)
                on_step(step)
    finally:
        store.close()
    return ReplayReport(first, last, num_values)


def read_schedule(store: TrajectoryStore) -> dict[int, RecordedStep]:
    """The steps of the surviving history whose training was recorded."""
    batches: dict[int, tuple[Any, int]] = {}
    schedule: dict[int, RecordedStep] = {}
    total_steps = 0
    for event in store.events("start", "batch", "trained"):
        if event.kind == "start":
            total_steps = int(event.detail["steps"])
        elif event.kind == "batch":
            batches[event.version + 1] = event.detail["members"], total_steps
        elif event.version in batches:
            schedule[event.version] = _recorded(event, *batches[event.version])
    return schedule


def _recorded(trained: Event, members: Any, total_steps: int) -> RecordedStep:
    keys = tuple((int(i), int(attempt), int(key)) for i, attempt, key in members)
    return RecordedStep(keys, trained.detail["metrics"], trained.detail["weights"], total_steps)


def _config_of(run_dir: Path) -> RLConfig:
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"run directory {str(run_dir)!r}: no run there (no config.yaml)")
    config = load_config(yaml.safe_load(path.read_text(encoding="utf-8")))
    if not isinstance(config, RLConfig):
        raise ConfigError(f"{path}: kind is {config.kind!r}, allowed: rl; others have no rollouts")
    return config


def _first_step(run_dir: Path, schedule: Mapping[int, RecordedStep], wanted: int | None) -> int:
    """The first step to compute; the state before it is a checkpoint, or the initial model."""
    states = sorted({0, *list_steps(run_dir)})
    possible = [state for state in states if state + 1 in schedule]
    if not possible:
        raise StoreError(
            f"{run_dir}: no recorded step follows a state that is still there (states: {states}, "
            f"recorded: {_range(schedule)}); keep more with store.* and checkpoint.keep"
        )
    if wanted is None:
        return possible[0] + 1
    if wanted not in possible:
        raise ConfigError(f"--from-step: got {wanted}, allowed: {', '.join(map(str, possible))}")
    return wanted + 1


def _range(schedule: Mapping[int, RecordedStep]) -> str:
    return f"{min(schedule)} to {max(schedule)}" if schedule else "none"


def _last_step(schedule: Mapping[int, RecordedStep], first: int) -> int:
    """The end of what can be computed in one go: a gap, or a change of ``steps`` (hence of the
    learning-rate schedule) when the run was prolonged, ends it."""
    last = first
    while last + 1 in schedule:
        if schedule[last + 1].total_steps != schedule[first].total_steps:
            log.warning("the run was prolonged after step %d; replay the rest from there", last)
            break
        last += 1
    return last


def _batch(
    store: TrajectoryStore, recorded: RecordedStep, step: int, config: RLConfig
) -> TensorDict:
    episodes = []
    for episode_id, attempt, key in recorded.members:
        rows = store.content(key).rows
        if rows is None:
            raise StoreError(f"step {step}: episode {episode_id} has no rows in the store")
        stored = unpack_rows(rows, episode_id=episode_id, attempt=attempt)
        episodes.append(check_rows(stored, episode_id, attempt)[0])
    limit = config.rollout.max_staleness
    return join_rows(episodes, version=step - 1, max_staleness=limit)[0]


def _compare(step: int, recorded: RecordedStep, metrics: Mapping[str, float], weights: str) -> int:
    """Number of values compared; all of them are equal."""
    names = list(dict.fromkeys([*recorded.metrics, *metrics]))
    pairs = [(name, recorded.metrics.get(name), metrics.get(name)) for name in names]
    pairs.append(("sha256 of the weights", recorded.weights, weights))  # type: ignore[arg-type]
    for name, before, now in pairs:
        both_nan = before != before and now != now
        if before != now and not both_nan:
            raise ReplayDiverged(
                f"step {step}: {name}: recorded {before!r}, replayed {now!r}. A replay is bitwise "
                "on the same machine with the same versions and run.threads; what changed?"
            )
    return len(pairs)


class _Replay:
    def __init__(self, config: RLConfig, learner: Learner) -> None:
        self._config = config
        self._learner = learner
        self.channel = f"replay-{os.getpid()}"

    def step(self, step: int, batch: TensorDict) -> tuple[dict[str, float], str]:
        """Metrics and digest of the weights after one step."""
        metrics = self._learner.learn(batch)
        meta = WeightUpdateMeta(
            "inprocess",
            version=step,
            incarnation="replay",
            channel=self.channel,
            dtype=self._config.inference.dtype,
        )
        self._learner.policy.upload_weights(meta)
        manifest = last_published(self.channel)
        assert manifest is not None
        self._learner.policy.set_version(step)
        return metrics, manifest.digest()


@contextmanager
def _training(config: RLConfig, run_dir: Path, first: int, total_steps: int) -> Iterator[_Replay]:
    """Everything that learns as it was before step ``first``."""
    config = config.model_copy(update={"steps": total_steps})
    set_threads(config)
    seed_generators(config.run.seed)
    model_path = resolve_model(config.model, seed=config.run.seed, workdir=run_dir)
    if config.warmup is not None:
        model_path = str(run_dir / "warmup" / "model")
    with open_learner(config, model_path) as learner:
        if first - 1 in list_steps(run_dir):
            learner.load(step_dir(run_dir, first - 1))
        replay = _Replay(config, learner)
        try:
            yield replay
        finally:
            release(replay.channel)
