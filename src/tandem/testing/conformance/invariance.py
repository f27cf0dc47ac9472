"""Checks that the numbers do not depend on how a step is cut, packed, padded, split or moved."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from tensordict import TensorDict

from tandem.testing.conformance.batches import jagged, left_padded, shard_rows, take
from tandem.testing.conformance.bench import Bench, Pass, largest, one_pass, weights
from tandem.testing.conformance.figure import Figure, NotApplicable, Part, count
from tandem.train import TrainEngine

CUTS: tuple[dict[str, Any], ...] = (
    {"microbatch_size": 1},
    {"microbatch_size": 3},
    {"max_tokens_per_microbatch": 20},
    {"max_tokens_per_microbatch": 31},
)
OFFLOADS = ("offload_params", "offload_optimizer", "offload_grads")


def microbatch_cut(bench: Bench) -> Figure:
    parts: list[Part] = []
    for config in CUTS:
        parts += bench.compare(_label(config), _pass(bench, **config), bench.expected())
    return parts


def several_calls(bench: Bench) -> Figure:
    """One optimizer step may span several calls of ``forward_backward_batch``."""
    with bench.engine() as engine:
        batch = bench.shard(engine, bench.batch)
        engine.optimizer_zero_grad()
        half = batch.batch_size[0] // 2
        first = engine.forward_backward_batch(batch[:half], bench.case.loss_fn).loss
        second = one_pass(engine, batch[half:], bench.case, zero=False)
    found = Pass(first + second.loss, second.norm, second.gradients)
    return bench.compare("two calls", found, bench.expected())


def packing(bench: Bench) -> Figure:
    """Rows of one pack do not see each other: changing one leaves the others as they were."""
    rows = bench.rows
    with bench.engine() as engine:
        mine = bench.shard(engine, rows)
        changed = mine.clone()
        ids = changed["input_ids"][0]
        changed["input_ids"][0] = torch.where(ids > 0, ids % 60 + 1, ids)
        before = engine.forward(mine)[bench.subject.output][1:]
        after = engine.forward(changed)[bench.subject.output][1:]
        parts = [Part("other rows when one changes", largest(after, before), 1e-6)]
        together = engine.forward(mine)[bench.subject.output]
        for number in range(_fewest_rows(engine, rows)):
            alone = engine.forward(mine[number : number + 1])[bench.subject.output]
            parts.append(
                bench.output_part(f"row {number} alone", alone, together[number : number + 1])
            )
    return parts


def row_order(bench: Bench) -> Figure:
    """Outputs come back in the order of the rows; the gradient does not depend on it."""
    with bench.engine(microbatch_size=2) as engine:
        batch = bench.shard(engine, bench.batch)
        order = list(range(batch.batch_size[0]))[::-1]
        shuffled = take(batch, order)
        found = one_pass(engine, shuffled, bench.case)
        outputs = engine.forward(shuffled)[bench.subject.output]
        straight = engine.forward(batch)[bench.subject.output]
    part = bench.output_part("outputs of rows in reverse", outputs, straight[torch.tensor(order)])
    return [part, *bench.compare("rows in reverse", found, bench.expected())]


def padding(bench: Bench) -> Figure:
    """Left, right and wider padding, and jagged rows, give the same; outputs keep the layout."""
    parts: list[Part] = []
    output = bench.subject.output
    with bench.engine() as engine:
        batch = bench.shard(engine, bench.batch)
        expected = engine.forward(batch)[output]
        per_token = expected.ndim == 2
        mask = batch["attention_mask"]
        layouts: dict[str, Callable[[TensorDict], TensorDict]] = {
            "left": left_padded,
            "jagged": jagged,
        }
        for name, change in layouts.items():
            variant = change(batch)
            parts += bench.compare(name, one_pass(engine, variant, bench.case), bench.expected())
            found = engine.forward(variant)[output]
            wanted = expected
            if per_token:
                is_nested = bool(found.is_nested)
                wrong = is_nested != (name == "jagged")
                parts.append(count("layout", [f"{name} in, nested={is_nested} out"] * wrong))
                inside = variant.get("attention_mask", mask)
                found, wanted = found.values() if is_nested else found[inside], expected[mask]
            parts.append(bench.output_part(f"outputs, {name}", found, wanted))
    return parts


def world_size(bench: Bench) -> Figure:
    """The rows spread over data-parallel ranks give the gradient of one device."""
    if bench.subject.world == 1:
        raise NotApplicable("one rank; run with --world N")
    with bench.engine() as engine:
        bench.needs_ranks(engine)
        found = one_pass(engine, bench.shard(engine, bench.batch), bench.case)
        size = engine.get_data_parallel_size()
    name = f"{size} data-parallel ranks"
    norm = abs(found.norm - bench.expected().norm) / bench.expected().norm
    tolerance = bench.subject.tolerance.gradient
    return [
        *bench.compare(name, found, bench.expected()),
        Part(f"{name}, gradient norm", norm, tolerance),
    ]


def tensor_parallel(bench: Bench) -> Figure:
    return _model_parallel(bench, "tensor")


def sequence_parallel(bench: Bench) -> Figure:
    """Of all rows in one pack, and of each alone, so that borders lie inside of rows."""
    whole = _model_parallel(bench, "sequence")
    return [*whole, *_model_parallel(bench, "sequence", microbatch_size=1)]


def checkpointing(bench: Bench) -> Figure:
    bench.needs("gradient_checkpointing")
    found = _pass(bench, gradient_checkpointing=True)
    return bench.compare("activation checkpointing", found, bench.expected())


def offload(bench: Bench) -> Figure:
    """Two steps under every combination of offloads end bit for bit where they end without."""
    bench.needs("offload")
    combinations = [
        dict(zip(OFFLOADS, chosen, strict=True)) for chosen in product((False, True), repeat=3)
    ]
    expected = _two_steps(bench, **combinations[0])
    parts: list[Part] = []
    for config in combinations[1:]:
        label = _label({name: True for name, is_on in config.items() if is_on})
        found = _two_steps(bench, **config)
        misses = {name: largest(found[name], expected[name]) for name in expected}
        worst = max(misses, key=lambda name: misses[name])
        parts.append(Part(f"{label}, {worst}", misses[worst], 0.0))
    return parts


def _two_steps(bench: Bench, **config: Any) -> dict[str, Any]:
    with bench.engine(**config) as engine:
        batch = bench.shard(engine, bench.batch)
        for _ in range(2):
            with engine.train_mode():
                engine.optimizer_zero_grad()
                engine.forward_backward_batch(batch, bench.case.loss_fn)
            # Gradients survive the way out and back in.
            with engine.train_mode():
                engine.optimizer_step()
                engine.lr_scheduler_step()
        return weights(engine)


def _model_parallel(bench: Bench, axis: str, **config: Any) -> Figure:
    degree = bench.subject.degree(axis)
    if degree == 1:
        raise NotApplicable(f"train.parallel.{axis} is 1; run with --{axis} N")
    with bench.engine(**config) as engine:
        data_ranks = engine.get_data_parallel_size()
        batch = bench.shard(engine, bench.batch)
        found = one_pass(engine, batch, bench.case)
        mine = bench.shard_rows(engine, bench.batch)
        outputs = engine.forward(batch)[bench.subject.output]
    with bench.oracle() as oracle:
        expected = oracle.forward(take(bench.batch, mine))[bench.subject.output]
    most = bench.subject.world // degree
    label = ", ".join(filter(None, (f"{axis} {degree}", _label(config))))
    return [
        count("ranks of one group count as one", [f"{data_ranks}"] if data_ranks > most else []),
        bench.output_part(f"outputs at {label}", outputs, expected),
        *bench.compare(label, found, bench.expected()),
    ]


def _pass(bench: Bench, **config: Any) -> Pass:
    with bench.engine(**config) as engine:
        return one_pass(engine, bench.shard(engine, bench.batch), bench.case)


def _fewest_rows(engine: TrainEngine, batch: TensorDict) -> int:
    """Rows that every data-parallel rank has at least, so that all make as many calls."""
    size = engine.get_data_parallel_size()
    return min(len(shard_rows(batch.batch_size[0], rank, size)) for rank in range(size))


def _label(config: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in config.items())
