"""Checks of checkpoints: resuming, resharding, the version, and what a wrong file does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from tandem.testing.conformance.bench import Bench, Tensors, movement_part, weight_part, weights
from tandem.testing.conformance.figure import Figure, count
from tandem.train import TrainEngine
from tandem.types import SaveLoadMeta

BEFORE, AFTER = 2, 2
CONFIG: dict[str, Any] = {"lr": 2e-3, "schedule": "linear", "warmup_steps": 1, "max_grad_norm": 0.3}
VERSION = 7


def resume(bench: Bench) -> Figure:
    """Steps after a load are bit for bit those of the run that went on."""
    run = bench.scratch / "resume"
    expected, rates = _interrupted(bench, run)
    with bench.engine(**CONFIG) as engine:
        engine.load_checkpoint(str(run))
        version = engine.get_version()
        found_rates = _steps(bench, engine, AFTER)
        found = weights(engine)
    return [
        weight_part(f"weights {AFTER} steps after the load", found, expected, 0.0),
        count("learning rates", _differing(found_rates, rates)),
        count("version", [] if version == VERSION else [f"{version} instead of {VERSION}"]),
    ]


def training_state(bench: Bench) -> Figure:
    """``save`` and ``load`` with ``with_optim`` resume as checkpoints do."""
    target = str(bench.scratch / "with_optim")
    with bench.engine(**CONFIG) as engine:
        _steps(bench, engine, BEFORE)
        engine.save(SaveLoadMeta(target, with_optim=True))
        bench.barrier()
        rates = _steps(bench, engine, AFTER)
        expected = weights(engine)
    with bench.engine(**CONFIG) as engine:
        engine.load(SaveLoadMeta(target, with_optim=True))
        found_rates = _steps(bench, engine, AFTER)
        found = weights(engine)
    return [
        weight_part(f"weights {AFTER} steps after the load", found, expected, 0.0),
        count("learning rates", _differing(found_rates, rates)),
    ]


def reshard(bench: Bench) -> Figure:
    """The local engine goes on from this backend's checkpoint, and this one from the local's."""
    run = bench.scratch / "reshard_out"
    expected, _ = _interrupted(bench, run)
    tolerance = bench.subject.tolerance.weight
    with bench.oracle(**CONFIG) as oracle:
        oracle.load_checkpoint(str(run))
        version = oracle.get_version()
        _whole_steps(bench, oracle, AFTER)
        outwards = weights(oracle)
        bench.barrier()
    start = bench.start()
    parts = [movement_part("local, from this backend", outwards, expected, start, tolerance)]
    back = bench.scratch / "reshard_in"
    with bench.oracle(**CONFIG) as oracle:
        _whole_steps(bench, oracle, BEFORE)
        oracle.set_version(VERSION)
        if _is_first(bench):
            oracle.save_checkpoint(str(back), global_step=BEFORE)
        bench.barrier()
        _whole_steps(bench, oracle, AFTER)
        expected = weights(oracle)
    with bench.engine(**CONFIG) as engine:
        engine.load_checkpoint(str(back))
        versions = [version, engine.get_version()]
        _steps(bench, engine, AFTER)
        inwards = weights(engine)
    wrong = [f"{number} instead of {VERSION}" for number in versions if number != VERSION]
    return [
        *parts,
        movement_part("this backend, from local", inwards, expected, start, tolerance),
        count("version", wrong),
    ]


def version(bench: Bench) -> Figure:
    """The version is what was set, also after training and scoring."""
    with bench.engine() as engine:
        seen = [engine.get_version()]
        engine.set_version(VERSION)
        engine.train_batch(bench.shard(engine, bench.batch), bench.case.loss_fn)
        engine.forward(bench.shard(engine, bench.batch))
        seen.append(engine.get_version())
    return [count("version", [] if seen == [0, VERSION] else [f"{seen}"])]


def _interrupted(bench: Bench, run: Path) -> tuple[Tensors, list[float]]:
    """Train, save in the middle, train on; the end, and the rates after the save."""
    with bench.engine(**CONFIG) as engine:
        _steps(bench, engine, BEFORE)
        engine.set_version(VERSION)
        engine.save_checkpoint(str(run), global_step=BEFORE)
        bench.barrier()
        rates = _steps(bench, engine, AFTER)
        return weights(engine), rates


def _steps(bench: Bench, engine: TrainEngine, number: int) -> list[float]:
    batch = bench.shard(engine, bench.batch)
    rates = []
    for _ in range(number):
        rates.append(engine.train_batch(batch, bench.case.loss_fn)["lr"])
        engine.lr_scheduler_step()
    return rates


def _whole_steps(bench: Bench, oracle: TrainEngine, number: int) -> None:
    for _ in range(number):
        oracle.train_batch(bench.batch, bench.case.loss_fn)
        oracle.lr_scheduler_step()


def _differing(found: list[float], expected: list[float]) -> list[str]:
    return [f"{a} instead of {b}" for a, b in zip(found, expected, strict=True) if a != b]


def _is_first(bench: Bench) -> bool:
    return bench.subject.world == 1 or dist.get_rank() == 0
