"""Checks of uneven work: micro-batches and ranks without weight, with more rows, at the cap."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from tandem.errors import DataError, TrainingDiverged
from tandem.testing.conformance.batches import LENGTHS, make_batch, shard_rows
from tandem.testing.conformance.bench import (
    Bench,
    Pass,
    movement_part,
    one_pass,
    weight_part,
    weights,
)
from tandem.testing.conformance.figure import Figure, count
from tandem.testing.conformance.losses import Wrapped
from tandem.train import TrainEngine
from tandem.types import Metric


def zero_weight_microbatch(bench: Bench) -> Figure:
    """A micro-batch without weight: a backward pass on zero, and the loss does not see it.

    Its rows hold NaN, which would be in the gradient if the loss were called.
    """
    batch = _without_weight(bench.batch, [0, 1, 4, 5])
    expected = _oracle_pass(bench, batch)
    poisoned = batch.clone()
    for key in ("advantages", "returns", "target"):
        poisoned[key][torch.tensor([0, 1, 4, 5])] = math.nan
    calls: list[str] = []

    def watch(outputs: Any, microbatch: TensorDict) -> None:
        if not bool((microbatch["loss_weights"] != 0).any()):
            calls.append("the loss was called without weight")

    with bench.engine(microbatch_size=1) as engine:
        found = one_pass(
            engine,
            bench.shard(engine, poisoned),
            replace(bench.case, loss_fn=Wrapped(bench.case.loss_fn, watch=watch)),
        )
    return [
        count("calls of the loss", calls),
        *bench.compare("micro-batches without weight", found, expected),
    ]


def zero_weight_rank(bench: Bench) -> Figure:
    """All weight on one rank; the others take part with zero."""
    calls: list[str] = []
    with bench.engine(microbatch_size=2) as engine:
        bench.needs_ranks(engine)
        size = engine.get_data_parallel_size()
        mine = shard_rows(bench.batch.batch_size[0], 0, size)
        others = sorted(set(range(bench.batch.batch_size[0])) - set(mine))
        batch = _without_weight(bench.batch, others)
        rank = engine.get_data_parallel_rank()

        def watch(outputs: Any, microbatch: TensorDict) -> None:
            if rank != 0:
                calls.append(f"the loss was called on rank {rank}")

        found = one_pass(
            engine,
            bench.shard(engine, batch),
            replace(bench.case, loss_fn=Wrapped(bench.case.loss_fn, watch=watch)),
        )
    return [
        count("calls of the loss", calls),
        *bench.compare("ranks without weight", found, _oracle_pass(bench, batch)),
    ]


def nothing_to_train(bench: Bench) -> Figure:
    """No weight anywhere: loss 0, no step, nothing counted as skipped."""
    batch = _without_weight(bench.batch, list(range(bench.batch.batch_size[0])))
    with bench.engine() as engine:
        before = weights(engine)
        found = engine.train_batch(bench.shard(engine, batch), bench.case.loss_fn)
        after = weights(engine)
        skipped = engine.skipped_steps
    wrong = [
        f"{name} is {found[name]}"
        for name in ("loss", "grad_norm", "update_successful")
        if found[name] != 0.0
    ]
    return [
        count("figures of the step", wrong + [f"{skipped} steps skipped"] * bool(skipped)),
        weight_part("weights", after, before, 0.0),
    ]


def uneven_tokens(bench: Bench) -> Figure:
    """One rank has most of the tokens."""
    return _uneven(bench, {}, "uneven tokens")


def unequal_microbatches(bench: Bench) -> Figure:
    """One rank has more micro-batches than the others."""
    return _uneven(bench, {"microbatch_size": 1}, "unequal micro-batches")


def at_the_cap(bench: Bench) -> Figure:
    """The longest row is exactly as long as a micro-batch may be."""
    with bench.engine(max_tokens_per_microbatch=max(LENGTHS)) as engine:
        found = one_pass(engine, bench.shard(engine, bench.batch), bench.case)
    return bench.compare(f"cap {max(LENGTHS)}", found, bench.expected())


def over_the_cap(bench: Bench) -> Figure:
    """A row over the cap, on one rank, is refused by name on all, and the engine goes on."""
    lengths, short = (4, 9, 3, 5), (4, 8, 3, 5)
    with bench.engine(max_tokens_per_microbatch=max(lengths) - 1) as engine:
        mine = lengths if engine.get_data_parallel_rank() == 0 else short
        batch = bench.weighted(bench.complete(make_batch(mine)), bench.case)
        before = weights(engine)
        calls = {
            "forward": lambda: engine.forward(batch),
            "forward_backward_batch": lambda: engine.forward_backward_batch(
                batch, bench.case.loss_fn
            ),
            "train_batch": lambda: engine.train_batch(batch, bench.case.loss_fn),
        }
        wrong = []
        for name, call in calls.items():
            try:
                call()
                wrong.append(f"{name} took a row of {max(lengths)} tokens")
            except DataError as error:
                if "row 1" not in str(error) or str(max(lengths)) not in str(error):
                    wrong.append(f"{name} does not name row and length: {error}")
        after = weights(engine)
        fitting = bench.weighted(bench.complete(make_batch(short)), bench.case)
        engine.train_batch(fitting, bench.case.loss_fn)
    return [count("refusals", wrong), weight_part("weights", after, before, 0.0)]


def non_finite(bench: Bench) -> Figure:
    """A gradient that is not finite on one rank: all skip alike, count it, and go on as before."""
    case = bench.case
    poison: dict[str, float] = {"factor": math.nan}

    def scale(loss: Tensor, metrics: dict[str, Metric], microbatch: TensorDict) -> Any:
        return loss * poison["factor"], metrics

    loss_fn = Wrapped(case.loss_fn, change=scale)
    with bench.engine(max_skipped_in_row=2, max_grad_norm=1.0) as engine:
        batch = bench.shard(engine, bench.batch)
        if engine.get_data_parallel_rank() != 0:
            poison["factor"] = 1.0
        before = weights(engine)
        skipped = engine.train_batch(batch, loss_fn)
        after = weights(engine)
        wrong = _after_skip(engine, skipped)
        poison["factor"] = 1.0
        engine.train_batch(batch, loss_fn)
        went_on = weights(engine)
        wrong += _diverges(engine, batch, loss_fn, poison)
    with bench.oracle(max_grad_norm=1.0) as oracle:
        oracle.train_batch(bench.batch, case.loss_fn)
        expected = weights(oracle)
    return [
        count("what a skipped step says", wrong),
        weight_part("weights after the skip", after, before, 0.0),
        movement_part(
            "weights after the next",
            went_on,
            expected,
            bench.start(),
            bench.subject.tolerance.weight,
        ),
    ]


def _after_skip(engine: TrainEngine, metrics: dict[str, float]) -> list[str]:
    wrong = []
    if metrics["update_successful"] != 0.0:
        wrong.append(f"update_successful is {metrics['update_successful']}")
    if math.isfinite(metrics["grad_norm"]):
        wrong.append(f"grad_norm is {metrics['grad_norm']} on a rank")
    if engine.skipped_steps != 1:
        wrong.append(f"skipped_steps is {engine.skipped_steps}")
    return wrong


def _diverges(
    engine: TrainEngine, batch: TensorDict, loss_fn: Any, poison: dict[str, float]
) -> list[str]:
    """Two skips in a row are ``TrainingDiverged`` here; one after a good step is not."""
    poison["factor"] = math.nan if engine.get_data_parallel_rank() == 0 else 1.0
    engine.train_batch(batch, loss_fn)
    try:
        engine.train_batch(batch, loss_fn)
    except TrainingDiverged:
        return []
    return ["no TrainingDiverged after max_skipped_in_row"]


def _uneven(bench: Bench, config: dict[str, Any], name: str) -> Figure:
    with bench.engine(**config) as engine:
        bench.needs_ranks(engine)
        batch = bench.shard(engine, bench.batch, uneven=True)
        found = one_pass(engine, batch, bench.case)
    return bench.compare(name, found, bench.expected())


def _without_weight(batch: TensorDict, rows: list[int]) -> TensorDict:
    found = batch.clone()
    for key in found.keys():  # noqa: SIM118
        if str(key).endswith("loss_weights"):
            found[key] = found[key].clone()
            found[key][torch.tensor(rows, dtype=torch.int64)] = 0.0
    return found


def _oracle_pass(bench: Bench, batch: TensorDict) -> Pass:
    with bench.oracle() as oracle:
        return one_pass(oracle, batch, bench.case)
