"""AdamW over fp32 masters, learning-rate schedules, gradient clipping.

When to step or skip is decided in ``engine``; how a backend computes the global norm, there too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tandem.config.schema import OptimizerConfig
from tandem.errors import ConfigError

# --- learning rate --------------------------------------------------------------------------------


def learning_rate(step: int, config: OptimizerConfig, total_steps: int | None) -> float:
    """Learning rate of optimizer step ``step`` (0-based): a pure function of the step.

    Linear warm-up from 0, then constant, or linear or cosine decay to ``min_lr_ratio`` at
    ``total_steps`` and constant after it.
    """
    if step < config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    if total_steps is None:
        raise ConfigError(
            f"schedule: got {config.schedule!r} without an end; give initialize(ft_spec=...)"
        )
    span = max(1, total_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    if config.schedule == "linear":
        factor = 1.0 - progress
    else:
        factor = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * factor)


# --- gradients ------------------------------------------------------------------------------------


def gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def squared_norm(grads: Iterable[Tensor]) -> Tensor:
    """Sum of squares over all gradients, in fp32."""
    grads = list(grads)
    if not grads:
        return torch.zeros(())
    norms = torch._foreach_norm([grad.float() for grad in grads])
    return torch.stack([norm.to(norms[0].device) for norm in norms]).square().sum()


def scale_gradients(grads: list[Tensor], norm: float, max_norm: float | None) -> None:
    """Scale ``grads`` in place so that their global norm is at most ``max_norm``.

    ``None`` and infinity turn clipping off.

    Raises:
        ConfigError: ``max_norm`` is 0, negative or NaN.
    """
    if max_norm is None or max_norm == math.inf:
        return
    if not max_norm > 0:
        raise ConfigError(
            f"max_grad_norm: got {max_norm}, allowed: a number > 0, or null for no clipping"
        )
    factor = max_norm / (norm + 1e-6)
    if factor < 1.0 and grads:
        torch._foreach_mul_(grads, factor)


# --- optimizer ------------------------------------------------------------------------------------


def build_optimizer(
    parameters: Mapping[str, nn.Parameter], config: OptimizerConfig
) -> torch.optim.AdamW:
    """AdamW over fp32 parameters; weight decay spares vectors (norms, biases).

    Parameters sharded over different meshes are in groups of their own: no fused operation spans
    two meshes.
    """
    members: dict[tuple[bool, Any], list[nn.Parameter]] = {}
    for p in parameters.values():
        members.setdefault((p.ndim < 2, getattr(p, "device_mesh", None)), []).append(p)
    groups = [
        {"params": group, "weight_decay": 0.0 if are_vectors else config.weight_decay}
        for (are_vectors, _), group in sorted(members.items(), key=lambda item: item[0][0])
    ]
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Every state tensor, for placement."""
    return [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]


def export_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """State as ``{"exp_avg.<parameter name>": tensor, ...}``; not copied."""
    return {
        f"{key}.{name}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def optimizer_problems(
    parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> list[str]:
    """Why a state is not one that ``export_optimizer`` made of these parameters."""
    problems = []
    kinds: dict[str, set[str]] = {}
    for key, tensor in tensors.items():
        kind, _, name = key.partition(".")
        kinds.setdefault(name, set()).add(kind)
        if name not in parameters:
            problems.append(f"optimizer state {key!r}: no such parameter in this model")
        elif tensor.ndim and tensor.shape != parameters[name].shape:
            problems.append(
                f"optimizer state {key!r}: shape {list(tensor.shape)}, expected "
                f"{list(parameters[name].shape)}"
            )
    expected = set().union(*kinds.values())
    problems += [
        f"optimizer state '{kind}.{name}': missing"
        for name, found in sorted(kinds.items())
        for kind in sorted(expected - found)
    ]
    return problems


def optimizer_entries(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, bool]]:
    """What ``import_optimizer`` needs to know of a state that ``export_optimizer`` made."""
    return {key: (tensor.dtype, tensor.ndim == 0) for key, tensor in tensors.items()}


def import_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    entries: Mapping[str, tuple[torch.dtype, bool]],
    copy_into: Callable[[Tensor, str], None],
) -> None:
    """Replace the whole state: ``entries`` are its keys with dtype and whether it is one number.

    ``copy_into(tensor, key)`` fills a tensor laid out as its parameter is.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for key, (dtype, is_number) in entries.items():
        kind, _, name = key.partition(".")
        parameter = parameters[name]
        if is_number:
            tensor = torch.zeros((), dtype=dtype, device=parameter.device)
        else:
            tensor = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        copy_into(tensor, key)
        found.setdefault(name, {})[kind] = tensor
    optimizer.state.clear()
    for name, state in found.items():
        optimizer.state[parameters[name]] = state
