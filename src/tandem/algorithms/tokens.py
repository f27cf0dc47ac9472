"""Statistics over masked token tensors, and reference log-probabilities.

What belongs here: means, variances and whitening under a mask, with the sum over data-parallel
ranks injected as ``reduce``. What does not: group statistics (``advantages``), loss weights
(``aggregation``), the memory-saving head that training uses (``tandem.models``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from tandem.errors import ConfigError

Reduce = Callable[[Tensor], Tensor]
"""Sum over data-parallel ranks of a small float64 tensor. Every rank must call it."""

WhitenForm = Literal["rsqrt(var+eps)", "rsqrt(max(var,eps))", "1/(std+eps)"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this magnitude before ``exp``: finite in float32."""


def identity(tensor: Tensor) -> Tensor:
    """The ``reduce`` of a single rank."""
    return tensor


def under_mask(x: Tensor, mask: Tensor) -> Tensor:
    """``x`` where ``mask``, else 0, in value and gradient.

    Mask the inputs of a function, not its result: 0 times a NaN derivative is NaN.
    """
    return torch.where(mask.bool(), x, torch.zeros((), dtype=x.dtype, device=x.device))


def masked_mean(x: Tensor, mask: Tensor, *, reduce: Reduce = identity) -> Tensor:
    """Mean of ``x`` over the mask; 0 for an empty mask."""
    count, total = _count_and_sum(x, mask, reduce)
    return (total / count.clamp(min=1)).to(x.dtype)


def masked_var(
    x: Tensor, mask: Tensor, *, ddof: Literal[0, 1] = 1, reduce: Reduce = identity
) -> Tensor:
    """Variance over the mask with divisor ``n - ddof``; 0 when that is not positive."""
    return _moments(x, mask, ddof, reduce)[1].to(x.dtype)


def masked_whiten(
    x: Tensor,
    mask: Tensor,
    *,
    ddof: Literal[0, 1] = 1,
    eps: float = 1e-8,
    form: WhitenForm = "rsqrt(var+eps)",
    shift_mean: bool = True,
    reduce: Reduce = identity,
) -> Tensor:
    """``x`` scaled to unit variance over the mask, 0 outside it.

    A constant ``x`` gives exactly 0 (its mean with ``shift_mean=False``, which adds the mean back).
    """
    mean, var = _moments(x, mask, ddof, reduce)
    if form == "rsqrt(var+eps)":
        scale = torch.rsqrt(var + eps)
    elif form == "rsqrt(max(var,eps))":
        scale = torch.rsqrt(var.clamp(min=eps))
    elif form == "1/(std+eps)":
        scale = 1.0 / (var.sqrt() + eps)
    else:
        raise ConfigError(f"form: got {form!r}, allowed: {WhitenForm.__args__}")
    is_constant = var.sqrt() <= 4 * torch.finfo(x.dtype).eps * mean.abs()
    scale = torch.where(is_constant, torch.zeros_like(scale), scale)
    out = (x - mean) * scale
    return under_mask(out if shift_mean else out + mean, mask).to(x.dtype)


def _count_and_sum(x: Tensor, mask: Tensor, reduce: Reduce) -> tuple[Tensor, Tensor]:
    count = mask.bool().sum(dtype=torch.float64)
    total = under_mask(x, mask).sum(dtype=torch.float64)
    count, total = reduce(torch.stack([count, total])).unbind()
    return count, total


def _moments(x: Tensor, mask: Tensor, ddof: int, reduce: Reduce) -> tuple[Tensor, Tensor]:
    """Mean and variance in float64, in two passes so that a large mean does not cancel."""
    if ddof not in (0, 1):
        raise ConfigError(f"ddof: got {ddof!r}, allowed: 0 or 1")
    count, total = _count_and_sum(x, mask, reduce)
    mean = total / count.clamp(min=1)
    squares = reduce(under_mask((x.double() - mean) ** 2, mask).sum().reshape(1))[0]
    var = torch.where(count > ddof, squares / (count - ddof).clamp(min=1), torch.zeros_like(count))
    return mean, var


def clamped_ratio(log_ratio: Tensor, *, bound: float = MAX_LOG_RATIO) -> Tensor:
    """``exp`` of the log-ratio clamped to ``[-bound, bound]``; no gradient beyond the bound."""
    return log_ratio.clamp(-bound, bound).exp()


def logprobs_and_entropy(
    logits: Tensor, labels: Tensor, temperature: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """``log softmax(logits / temperature)[label]`` and the entropy of that distribution.

    ``logits [..., V]``, ``labels [...]``, ``temperature`` a number or ``[...]``. Logits of ``-inf``
    (tokens that cannot be sampled) count as probability 0, also in the gradient. The plain
    reference: it holds the full vocabulary in memory.
    """
    scaled = logits / (temperature[..., None] if isinstance(temperature, Tensor) else temperature)
    log_p = torch.log_softmax(scaled, dim=-1)
    finite = log_p.masked_fill(log_p == -torch.inf, 0.0)
    entropy = -(torch.softmax(scaled, dim=-1) * finite).sum(dim=-1)
    return log_p.gather(-1, labels[..., None]).squeeze(-1), entropy
