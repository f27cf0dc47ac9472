"""Checks of the optimizer step and of the learning rate against torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from tandem.testing.conformance import reference
from tandem.testing.conformance.batches import HORIZON
from tandem.testing.conformance.bench import (
    TOTAL_STEPS,
    Bench,
    movement_part,
    one_pass,
    weight_part,
    weights,
)
from tandem.testing.conformance.figure import Figure, Part, count
from tandem.testing.conformance.reference import PlainModel, aggregate

MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler]

LR, WARMUP, DECAY, CLIP = 3e-4, 2, 0.1, 0.3
BETAS, EPS = (0.8, 0.95), 1e-3
NUM_STEPS = 4

SCHEDULES: dict[str, tuple[dict[str, Any], MakeScheduler]] = {
    "constant with warm-up": (
        {"schedule": "constant", "warmup_steps": WARMUP},
        lambda optimizer: get_constant_schedule_with_warmup(optimizer, WARMUP),
    ),
    "linear with warm-up": (
        {"schedule": "linear", "warmup_steps": WARMUP},
        lambda optimizer: get_linear_schedule_with_warmup(optimizer, WARMUP, TOTAL_STEPS),
    ),
    "cosine with warm-up": (
        {"schedule": "cosine", "warmup_steps": WARMUP},
        lambda optimizer: get_cosine_schedule_with_warmup(optimizer, WARMUP, TOTAL_STEPS),
    ),
    "linear to a tenth": (
        {"schedule": "linear", "min_lr_ratio": 0.1},
        lambda optimizer: LinearLR(optimizer, 1.0, 0.1, total_iters=TOTAL_STEPS),
    ),
    "cosine to a tenth": (
        {"schedule": "cosine", "min_lr_ratio": 0.1},
        lambda optimizer: CosineAnnealingLR(optimizer, TOTAL_STEPS, eta_min=0.1 * LR),
    ),
}


def steps(bench: Bench) -> Figure:
    """Weights and gradient norms over steps of AdamW with warm-up, decay and clipping."""
    norms, rates, expected = _plain_steps(bench)
    found_norms, found_rates = [], []
    config: dict[str, Any] = {
        "lr": LR,
        "betas": BETAS,
        "eps": EPS,
        "weight_decay": DECAY,
        "max_grad_norm": CLIP,
        "schedule": "cosine",
        "warmup_steps": WARMUP,
    }
    with bench.engine(**config) as engine:
        batch = bench.shard(engine, bench.batch)
        for _ in range(NUM_STEPS):
            metrics = engine.train_batch(batch, bench.case.loss_fn)
            found_norms.append(metrics["grad_norm"])
            found_rates.append(metrics["lr"])
            engine.lr_scheduler_step()
        found = weights(engine)
    tolerance = bench.subject.tolerance
    label = f"weights after {NUM_STEPS} steps"
    parts = [movement_part(label, found, expected, bench.start(), tolerance.weight)]
    for number in range(NUM_STEPS):
        miss = abs(found_norms[number] - norms[number]) / norms[number]
        # Later norms are those of weights that are no longer quite the same.
        allowed = tolerance.weight if number else tolerance.gradient
        parts.append(Part(f"norm of step {number}", miss, allowed))
        rate = abs(found_rates[number] - rates[number]) / LR
        parts.append(Part(f"lr of step {number}", rate, 1e-9))
    return parts


def learning_rates(bench: Bench) -> Figure:
    """Every schedule over its whole length and beyond, as ``lr_scheduler_step`` returns it."""
    parts = []
    for name, (config, make) in SCHEDULES.items():
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([parameter], lr=LR)
        scheduler = make(optimizer)
        # A cosine of torch's goes up again after its end, which no schedule of ours does.
        length = TOTAL_STEPS if name.startswith("cosine") else TOTAL_STEPS + 2
        expected = []
        for _ in range(length):
            optimizer.step()
            scheduler.step()
            expected.append(float(optimizer.param_groups[0]["lr"]))
        with bench.engine(lr=LR, **config) as engine:
            found = [engine.lr_scheduler_step() for _ in range(length)]
        miss = max(abs(a - b) for a, b in zip(found, expected, strict=True)) / LR
        parts.append(Part(name, miss, 1e-9))
    return parts


def separate_calls(bench: Bench) -> Figure:
    """``train_batch`` is zero, forward and backward, and one step; the schedule is the caller's."""
    with bench.engine(max_grad_norm=CLIP) as engine:
        batch = bench.shard(engine, bench.batch)
        engine.train_batch(batch, bench.case.loss_fn)
        expected = weights(engine)
    with bench.engine(max_grad_norm=CLIP) as engine:
        one_pass(engine, batch, bench.case)
        untouched = engine.lr_scheduler_step()
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch, bench.case.loss_fn)
        before = weights(engine)
        engine.optimizer_step()
        found = weights(engine)
        left = [name for name, p in engine.parameters().items() if p.grad is None]
        engine.optimizer_zero_grad()
        kept = [name for name, p in engine.parameters().items() if p.grad is not None]
    moved = max(float((found[name] - before[name]).abs().max()) for name in found)
    return [
        weight_part("weights", found, expected, 0.0),
        count("a step moves the weights", [] if moved > 0 else ["nothing moved"]),
        count("the schedule gives a rate", [] if untouched > 0 else [f"lr {untouched}"]),
        count("gradients stay until they are zeroed", left[: len(left) == len(found)]),
        count("gradients are gone after zeroing", kept),
    ]


def _plain_steps(bench: Bench) -> tuple[list[float], list[float], dict[str, Tensor]]:
    rows, case = bench.rows, bench.case

    def loss_of(model: PlainModel) -> Tensor:
        per_token = case.per_token(model.outputs(rows), rows)
        if case.per_row:
            return per_token.mean()
        return aggregate(per_token, rows["loss_mask"], "token-mean", horizon=HORIZON)

    model = bench.plain()
    norms, rates = reference.train(
        model,
        loss_of,
        steps=NUM_STEPS,
        options={"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY},
        max_grad_norm=CLIP,
        make_scheduler=SCHEDULES["cosine with warm-up"][1],
    )
    return norms, rates, {name: p.detach().clone() for name, p in model.parameters().items()}
