"""Checks of an optimizer step: AdamW, master weights, gradient clipping, learning rates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tandem.config import OptimizerConfig
from tandem.errors import ConfigError
from tandem.testing.numerics.case import Case, Results
from tandem.train.optim import build_optimizer, learning_rate, scale_gradients, squared_norm


def check_adamw(case: Case) -> Results:
    p = case.params
    config = OptimizerConfig(
        lr=p["lr"], betas=tuple(p["betas"]), eps=p["eps"], weight_decay=p["weight_decay"]
    )
    grad = case.inputs["grad"]
    return {"w": _after_steps(case.inputs["w"], grad, config, case.dtype, p.get("step", 1))}


def check_precision(case: Case) -> Results:
    """A constant gradient makes AdamW's step exactly the learning rate, here the case's update."""
    update, steps = case.inputs["update"], case.params["steps"]
    config = OptimizerConfig(lr=abs(update), eps=1e-30)
    gradient = -update / abs(update)
    start = case.inputs["w"]
    master = _after_steps(start, gradient, config, case.dtype, steps)
    return {
        "bf16_no_master": _after_steps(start, gradient, config, torch.bfloat16, steps),
        "fp32_master": master,
        "bf16_copy_of_master": master.bfloat16().float(),
    }


def _after_steps(
    start: float, gradient: float, config: OptimizerConfig, dtype: torch.dtype, steps: int
) -> Tensor:
    # Two dimensions, because weight decay spares vectors.
    parameter = nn.Parameter(torch.full((1, 1), start, dtype=dtype))
    optimizer = build_optimizer({"weight": parameter}, config)
    for _ in range(steps):
        parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()
    return parameter.detach()[0, 0]


def check_lr_schedule(case: Case) -> Results:
    p = case.params
    kind = next((name for name in ("linear", "constant") if name in case.id), "cosine")
    config = OptimizerConfig(
        lr=p["base"],
        schedule=kind,
        warmup_steps=p.get("warmup", 0),
        min_lr_ratio=p.get("min_ratio", 0.0),
    )
    steps = case.inputs["steps"]
    return {"lr": [learning_rate(step, config, p.get("total")) for step in steps]}


def check_grad_clip(case: Case) -> Results:
    max_norm = case.params["max_norm"]
    grads = case.floats("grads")
    norm = float(squared_norm([grads]).sqrt())
    if not isinstance(max_norm, list):
        return {"norm": norm, "clipped": _clipped(grads, norm, max_norm)}
    return {_name_of(limit): _clipped(grads, norm, float(limit)) for limit in max_norm}


def _clipped(grads: Tensor, norm: float, max_norm: float) -> Any:
    scaled = grads.clone()
    try:
        scale_gradients([scaled], norm, max_norm)
    except ConfigError:
        return "error"
    return scaled


def _name_of(limit: Any) -> str:
    value = float(limit)
    if value != value:
        return "nan"
    return "inf" if value == float("inf") else "zero" if value == 0 else "negative"
