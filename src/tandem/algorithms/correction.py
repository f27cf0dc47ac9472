"""Corrections for tokens that were sampled by another policy than the one the ratio starts from.

What belongs here: weights and masks from ``prox_logprobs`` and the sampler's ``logprobs``, in a
pass over the whole step *before* loss weights are computed. What does not: diagnostics
(``mismatch``), the policy losses that the weights multiply.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from tandem.algorithms.policy.ratios import log_ratios, row_mean
from tandem.algorithms.tokens import MAX_LOG_RATIO, Reduce, identity, masked_mean, under_mask
from tandem.errors import ConfigError, DataError


def decoupled_cap(
    prox_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, *, cap: float = 5.0
) -> tuple[Tensor, Tensor]:
    """``w = pi_prox / pi_sampler``; tokens with ``w > cap`` are dropped (arXiv 2505.24298)."""
    _positive("cap", cap)
    w = _weights(prox_logprobs, sampler_logprobs, mask)
    keep = w <= cap
    return under_mask(w, keep), mask.bool() & keep


def tis(
    prox_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    *,
    cap: float = 2.0,
    normalise: bool = False,
    reduce: Reduce = identity,
) -> tuple[Tensor, Tensor]:
    """Truncated importance sampling: ``min(w, cap)``, nothing dropped.

    ``normalise`` divides by the mean weight over all trained tokens of the step.
    """
    _positive("cap", cap)
    w = under_mask(_weights(prox_logprobs, sampler_logprobs, mask).clamp(max=cap), mask)
    if normalise:
        w = w / masked_mean(w, mask, reduce=reduce).clamp(min=torch.finfo(w.dtype).tiny)
    return w, mask.bool()


def icepop(
    prox_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    *,
    low: float = 0.5,
    high: float = 2.0,
) -> tuple[Tensor, Tensor]:
    """``w`` inside ``[low, high]``, 0 outside."""
    _band(low, high)
    w = _weights(prox_logprobs, sampler_logprobs, mask)
    keep = mask.bool() & (w >= low) & (w <= high)
    return under_mask(w, keep), keep


def mis(
    prox_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    *,
    low: float = 0.5,
    high: float = 2.0,
    level: str = "token",
) -> tuple[Tensor, Tensor]:
    """Rejection without weights: tokens, or whole rows by the geometric mean of ``w``, outside
    ``[low, high]`` are dropped (``level="token"`` or ``"sequence"``)."""
    _band(low, high)
    w = _weights(prox_logprobs, sampler_logprobs, mask)
    if level == "sequence":
        w = geometric_ratio(prox_logprobs, sampler_logprobs, mask)[:, None]
    elif level != "token":
        raise ConfigError(f"level: got {level!r}, allowed: token, sequence")
    keep = mask.bool() & (w >= low) & (w <= high)
    return keep.to(prox_logprobs.dtype), keep


def veto(
    prox_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, *, low: float = 1e-4
) -> tuple[Tensor, Tensor]:
    """A row is dropped whole when ``w`` of any of its trained tokens is below ``low``."""
    w = _weights(prox_logprobs, sampler_logprobs, mask)
    vetoed = (mask.bool() & (w < low)).any(dim=1, keepdim=True)
    keep = mask.bool() & ~vetoed
    return keep.to(prox_logprobs.dtype), keep


def seq_mask_tis(
    prox_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    *,
    low: float = 0.5,
    high: float = 2.0,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Token weights ``w``, at most ``cap``; rows are dropped by their geometric mean."""
    _band(low, high)
    geometric = geometric_ratio(prox_logprobs, sampler_logprobs, mask)[:, None]
    keep = mask.bool() & (geometric >= low) & (geometric <= high)
    w = _weights(prox_logprobs, sampler_logprobs, mask)
    return under_mask(w if cap is None else w.clamp(max=cap), keep), keep


def seq_tis_product(
    prox_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, *, cap: float = 2.0
) -> tuple[Tensor, Tensor]:
    """``min(prod w, cap)`` for every token of a row: the unbiased weight of a response, truncated.

    The logarithm of the product is clamped to +-20.
    """
    _positive("cap", cap)
    total = log_ratios(prox_logprobs, sampler_logprobs, mask).detach().sum(dim=1, keepdim=True)
    w = total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=cap)
    return under_mask(w.expand(mask.shape), mask), mask.bool()


def seq_tis_geometric(
    prox_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, *, cap: float = 2.0
) -> tuple[Tensor, Tensor]:
    """``min(geometric mean of w, cap)`` for every token of a row."""
    _positive("cap", cap)
    w = geometric_ratio(prox_logprobs, sampler_logprobs, mask)[:, None].clamp(max=cap)
    return under_mask(w.expand(mask.shape), mask), mask.bool()


def seq_mis_product(
    prox_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    *,
    low: float = 0.5,
    high: float = 2.0,
) -> tuple[Tensor, Tensor]:
    """Rows whose product of ``w`` is outside ``[low, high]`` are dropped; the others weigh 1.

    ``mis`` with ``level="sequence"`` is the same with the geometric mean.
    """
    _band(low, high)
    total = log_ratios(prox_logprobs, sampler_logprobs, mask).detach().sum(dim=1, keepdim=True)
    w = total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    keep = mask.bool() & (w >= low) & (w <= high)
    return keep.to(prox_logprobs.dtype), keep


CORRECTIONS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "decoupled_cap": decoupled_cap,
    "tis": tis,
    "icepop": icepop,
    "mis": mis,
    "veto": veto,
    "seq_mask_tis": seq_mask_tis,
    "seq_tis_product": seq_tis_product,
    "seq_tis_geometric": seq_tis_geometric,
    "seq_mis_product": seq_mis_product,
}
"""``correct(prox_logprobs, sampler_logprobs, mask, **params) -> (weights, kept mask)``."""

REJECTIONS = frozenset({"mis", "veto", "seq_mis_product"})
"""Corrections that reject: what they drop leaves the denominator of the loss too."""


def behaviour_correction(
    batch: TensorDict,
    *,
    method: str = "decoupled_cap",
    drop_from_denominator: bool | None = None,
    **params: Any,
) -> tuple[TensorDict, dict[str, float]]:
    """A new batch with ``behaviour_weights`` ``[B, T]``, and metrics.

    They come from ``prox_logprobs`` and ``logprobs`` by one of ``CORRECTIONS``. Call it with all
    rows of an optimizer step, before ``loss_weights``. Dropped tokens have weight 0 in the policy
    loss. With ``drop_from_denominator`` they leave ``loss_mask``, so every term and denominator;
    without, they still count there, as in AReaL. ``None`` does so for ``REJECTIONS`` only. A
    second call replaces the weights and keeps the smaller mask, so a rejection can come before a
    weighting.
    """
    check_correction(method, params)
    for key in ("prox_logprobs", "logprobs", "loss_mask"):
        if key not in batch:
            raise DataError(f"{key}: missing from the batch, required by behaviour_correction")
    weights, kept = CORRECTIONS[method](
        batch["prox_logprobs"], batch["logprobs"], batch["loss_mask"], **params
    )
    out = batch.clone(recurse=False)
    out["behaviour_weights"] = weights
    if drop_from_denominator or (drop_from_denominator is None and method in REJECTIONS):
        out["loss_mask"] = kept
    return out, _correction_metrics(out["behaviour_weights"], kept, batch["loss_mask"].bool())


def check_correction(method: str, params: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` unless there is a correction ``method`` that takes ``params``."""
    if method not in CORRECTIONS:
        raise ConfigError(f"method: got {method!r}, allowed: {', '.join(CORRECTIONS)}")
    parameters = inspect.signature(CORRECTIONS[method]).parameters.values()
    known = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - {"reduce"}
    if unknown := sorted(set(params) - known - {"drop_from_denominator"}):
        raise ConfigError(
            f"correction {method}: it does not take {unknown[0]!r}, allowed: "
            f"{', '.join(sorted({*known, 'drop_from_denominator'}))}"
        )


def _correction_metrics(weights: Tensor, kept: Tensor, mask: Tensor) -> dict[str, float]:
    if not bool(mask.any()):
        return {}
    return {
        "behaviour/dropped_fraction": 1.0 - float(kept[mask].float().mean()),
        "behaviour/weight_mean": float(weights[mask].mean()),
        "behaviour/weight_max": float(weights[mask].max()),
    }


def geometric_ratio(prox_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Geometric mean of ``w`` over the trained tokens of each row, ``[B]``."""
    return row_mean(log_ratios(prox_logprobs, sampler_logprobs, mask).detach(), mask).exp()[:, 0]


def prox_loglinear(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    *,
    sampler_versions: Tensor,
    prox_version: Tensor | int,
    current_version: Tensor | int,
) -> Tensor:
    """``prox_logprobs`` without a forward pass, on the line from sampler to current policy.

    ``alpha = (v_prox - v_sampler) / (v_current - v_sampler)`` (A-3PO, arXiv 2512.06547); a token
    sampled by the current version has ``alpha = 1``.
    """
    span = (current_version - sampler_versions).to(logprobs.dtype)
    reach = (prox_version - sampler_versions).to(logprobs.dtype)
    alpha = torch.where(span > 0, reach / span.clamp(min=1), 1.0).clamp(0.0, 1.0)
    return sampler_logprobs + alpha * (logprobs.detach() - sampler_logprobs)


def _weights(prox_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
    return under_mask(log_ratios(prox_logprobs, sampler_logprobs, mask).detach().exp(), mask)


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{name}: got {value!r}, allowed: a number > 0")


def _band(low: float, high: float) -> None:
    if not 0 <= low <= high:
        raise ConfigError(f"low, high: got {low!r}, {high!r}, allowed: 0 <= low <= high")
