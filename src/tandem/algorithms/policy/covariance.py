"""Clip-Cov and KL-Cov (arXiv 2505.22617): restrain the tokens that drive the entropy down.

The selection needs the whole step, so it is a pre-pass: ``select_clip_cov`` or ``select_kl_cov``
write ``cov_selected`` into the batch, and the losses read it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.policy.ppo_clip import ppo_clip
from tandem.algorithms.policy.ratios import log_ratios, mean_kl
from tandem.algorithms.tokens import Reduce, identity, masked_mean, under_mask


def token_covariance(
    logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, *, reduce: Reduce = identity
) -> Tensor:
    """``(A - mean A)(log pi - mean log pi)`` per trained token, means over the step; else 0."""
    a = advantages_BT - masked_mean(advantages_BT, mask_BT, reduce=reduce)
    lp = logprobs_BT - masked_mean(logprobs_BT, mask_BT, reduce=reduce)
    return under_mask(a.detach() * lp.detach(), mask_BT)


def clip_cov_candidates(
    covariance_BT: Tensor,
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """Trained tokens with ``cov_low < covariance < cov_high`` that PPO does not clip already."""
    _, stats = ppo_clip(
        logprobs_BT.detach(),
        old_logprobs_BT,
        advantages_BT,
        mask_BT,
        clip_low=clip_low,
        clip_high=clip_high,
    )
    inside = (covariance_BT > cov_low) & (covariance_BT < cov_high)
    return inside & ~stats["pg_clipfrac"] & mask_BT.bool()


def select_clip_cov(
    candidates_BT: Tensor,
    mask_BT: Tensor,
    *,
    ratio: float = 2e-4,
    generator: torch.Generator | None = None,
    reduce: Reduce = identity,
) -> Tensor:
    """A random subset of the candidates, ``max(1, int(ratio * trained tokens))`` of the step."""
    lots = torch.rand(candidates_BT.shape, generator=generator, dtype=torch.float64)
    lots = lots.to(candidates_BT.device)
    return _top(lots, candidates_BT, _how_many(ratio, mask_BT, reduce), reduce)


def select_kl_cov(
    covariance_BT: Tensor, mask_BT: Tensor, *, ratio: float = 2e-3, reduce: Reduce = identity
) -> Tensor:
    """The ``max(1, int(ratio * trained tokens))`` trained tokens of largest covariance."""
    count = _how_many(ratio, mask_BT, reduce)
    return _top(covariance_BT.double(), mask_BT.bool(), count, reduce)


def clip_cov(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    cov_selected: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clip; the selected tokens contribute neither loss nor gradient."""
    loss, stats = ppo_clip(
        logprobs_BT,
        old_logprobs_BT,
        advantages_BT,
        mask_BT,
        clip_low=clip_low,
        clip_high=clip_high,
    )
    stats["cov_selected"] = cov_selected
    return under_mask(loss, ~cov_selected.bool()), stats


def kl_cov(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    cov_selected: Tensor,
    beta: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``-A r``, plus ``beta |log r|`` on the selected tokens."""
    log_ratio = log_ratios(logprobs_BT, old_logprobs_BT, mask_BT)
    loss = -under_mask(advantages_BT.detach(), mask_BT) * log_ratio.exp()
    loss = loss + under_mask(beta * log_ratio.abs(), cov_selected)
    return loss, {"ppo_kl": mean_kl(log_ratio), "cov_selected": cov_selected}


def _how_many(ratio: float, mask_BT: Tensor, reduce: Reduce) -> int:
    num_tokens = float(reduce(mask_BT.bool().sum(dtype=torch.float64).reshape(1))[0])
    return max(1, int(ratio * num_tokens))


def _top(scores: Tensor, eligible: Tensor, count: int, reduce: Reduce) -> Tensor:
    """The ``count`` largest eligible float64 scores over all ranks (more if the last ones tie).

    Only sums cross ranks, so the threshold is found by bisection over the ordered bit patterns of
    floats: 64 sums of one number, the same answer for every split over ranks.
    """
    bits = (scores + 0.0).view(torch.int64)
    ordered = torch.where(bits < 0, bits ^ 0x7FFF_FFFF_FFFF_FFFF, bits)
    low, high = -(1 << 63), (1 << 63) - 1
    while low < high:
        middle = (low + high + 1) >> 1
        at_least = (eligible & (ordered >= middle)).sum(dtype=torch.float64)
        if float(reduce(at_least.reshape(1))[0]) >= count:
            low = middle
        else:
            high = middle - 1
    return eligible & (ordered >= low)
