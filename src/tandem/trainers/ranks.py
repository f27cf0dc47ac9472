"""A trainer under a launcher: the first rank runs it, the others follow its engines.

The one place of the trainers that knows of ranks. Everything a run has once (rollout, store,
metrics, run directory, console) is the first rank's; engines that can be shared are everybody's.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol, TypeVar

from tandem.config import RLConfig, Root, TrainConfig
from tandem.config.launcher import launcher_facts
from tandem.errors import CapabilityError
from tandem.launch import follow, leading
from tandem.train import EngineRegistry
from tandem.trainers.run import StopSignal, seed_generators, set_threads

Config = TypeVar("Config", bound=Root, contravariant=True)


class Trainer(Protocol[Config]):
    def __call__(self, config: Config, *, resume: bool = False) -> dict[str, Any]: ...


def on_all_ranks(trainer: Trainer[Config]) -> Trainer[Config]:
    """The trainer, with every rank that a launcher started taking part. All return the summary."""

    @functools.wraps(trainer)
    def run(config: Config, *, resume: bool = False) -> dict[str, Any]:
        facts = launcher_facts()
        if facts.world_size == 1:
            return trainer(config, resume=resume)
        train = _shared_engine(config, facts.world_size)
        if facts.rank == 0:
            return leading(train, lambda: trainer(config, resume=resume))
        set_threads(config)
        # Ranks draw apart: dropout of an adapter must not repeat over rows.
        seed_generators(config.run.seed + facts.rank)
        with StopSignal() as stop:
            return follow(train, stop)

    return run


def _shared_engine(config: Root, world_size: int) -> TrainConfig:
    """Of the engine that the run is about, which has to be one that ranks can share."""
    section = config if isinstance(config, RLConfig) else getattr(config, _kind(config))
    train: TrainConfig = section.train
    model_type = "reward_model" if _kind(config) == "reward" else "language_model"
    engine = EngineRegistry.get_engine_cls(model_type, train.backend, train.device)
    if not engine.spans_ranks:
        key = "train.backend" if section is config else f"{_kind(config)}.train.backend"
        raise CapabilityError(
            f"{key}: got {train.backend!r}, which runs on one rank, but {world_size} were started "
            "(WORLD_SIZE); allowed: fsdp, or start one process"
        )
    return train


def _kind(config: Root) -> str:
    kind: str = config.kind  # type: ignore[attr-defined]
    return kind
