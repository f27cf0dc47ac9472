"""Checks of the loss and of every gradient against the plain loop, for every loss and aggregation.

The same comparison is made for the oracle, whose word the other checks take.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from tandem.algorithms.aggregation import AGGREGATION_MODES
from tandem.testing.conformance.batches import HORIZON
from tandem.testing.conformance.bench import (
    Bench,
    Pass,
    gradient_part,
    one_pass,
)
from tandem.testing.conformance.figure import Figure, Part
from tandem.testing.conformance.losses import LOSS_CASES, LossCase, Wrapped
from tandem.testing.conformance.reference import aggregate
from tandem.testing.conformance.subject import TOLERANCES
from tandem.train import TrainEngine
from tandem.types import Metric


@dataclass(frozen=True, slots=True)
class Truth:
    """One loss of the plain loop; ``scale`` is the sum of its terms' magnitudes, at least 1."""

    loss: float
    scale: float
    gradients: dict[str, Tensor]


Truths = dict[tuple[str, str], Truth]


def oracle_losses(bench: Bench) -> Figure:
    return bench.kept("oracle losses", lambda: _oracle(bench))[0]


def oracle_gradients(bench: Bench) -> Figure:
    return bench.kept("oracle losses", lambda: _oracle(bench))[1]


def losses(bench: Bench) -> Figure:
    return bench.kept("losses", lambda: _subject(bench))[0]


def gradients(bench: Bench) -> Figure:
    return bench.kept("losses", lambda: _subject(bench))[1]


def weighted_means(bench: Bench) -> Figure:
    """``loss_weight_fn``: the means of micro-batches and ranks combined by their weights."""

    def count_tokens(microbatch: TensorDict) -> float:
        return float(microbatch["attention_mask"].sum())

    def divide(loss: Tensor, metrics: dict[str, Metric], microbatch: TensorDict) -> Any:
        return loss / count_tokens(microbatch), metrics

    mean = replace(bench.case, loss_fn=Wrapped(bench.case.loss_fn, change=divide))
    expected = bench.expected()
    total = count_tokens(bench.batch)
    wanted = Pass(
        expected.loss / total,
        expected.norm / total,
        {name: gradient / total for name, gradient in expected.gradients.items()},
    )
    parts: list[Part] = []
    cuts: tuple[dict[str, Any], ...] = ({}, {"microbatch_size": 1})
    for config in cuts:
        with bench.engine(**config) as engine:
            batch = bench.shard(engine, bench.batch, uneven=True)
            found = one_pass(engine, batch, mean, loss_weight_fn=count_tokens)
        parts += bench.compare(f"loss_weight_fn {config or ''}", found, wanted)
    return parts


def _combinations(bench: Bench) -> Iterator[tuple[LossCase, str]]:
    for case in LOSS_CASES[bench.subject.model_type]:
        for mode in AGGREGATION_MODES[:1] if case.per_row else AGGREGATION_MODES:
            yield case, mode


def _truth(bench: Bench) -> Truths:
    """Loss and gradient of the plain loop by loss and aggregation, from one forward pass."""
    model, rows = bench.plain(), bench.rows
    outputs = model.outputs(rows)
    found: Truths = {}
    for case, mode in _combinations(bench):
        per_token = case.per_token(outputs, rows)
        loss, scale = (_total(case, term, rows, mode) for term in (per_token, per_token.abs()))
        gradients = model.gradients(loss)
        magnitude = max(1.0, float(scale.detach()))
        found[case.name, mode] = Truth(float(loss.detach()), magnitude, gradients)
    return found


def _total(case: LossCase, terms: Tensor, rows: TensorDict, mode: str) -> Tensor:
    if case.per_row:
        return terms.mean()
    return aggregate(terms, rows["loss_mask"], mode, horizon=HORIZON)


def _oracle(bench: Bench) -> tuple[list[Part], list[Part]]:
    with bench.oracle() as oracle:
        return _compare(bench, oracle, "float32", is_whole=True)


def _subject(bench: Bench) -> tuple[list[Part], list[Part]]:
    with bench.engine() as engine:
        return _compare(bench, engine, bench.subject.dtype, is_whole=False)


def _compare(
    bench: Bench, engine: TrainEngine, dtype: str, *, is_whole: bool
) -> tuple[list[Part], list[Part]]:
    truth = bench.kept("truth", lambda: _truth(bench))
    tolerance = TOLERANCES[dtype]
    loss_parts, gradient_parts = [], []
    for case, mode in _combinations(bench):
        batch = bench.weighted(bench.rows, case, mode)
        found = one_pass(engine, batch if is_whole else bench.shard(engine, batch), case)
        wanted = truth[case.name, mode]
        name = case.name if case.per_row else f"{case.name}, {mode}"
        miss = abs(found.loss - wanted.loss) / wanted.scale
        loss_parts.append(Part(name, miss, tolerance.loss))
        gradient_parts.append(
            gradient_part(name, found.gradients, wanted.gradients, tolerance.gradient)
        )
    return loss_parts, gradient_parts
