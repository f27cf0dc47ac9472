"""Losses whose ratio belongs to the whole response: GSPO and GMPO. A row is one response."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.policy.ppo_clip import check_clip
from tandem.algorithms.policy.ratios import log_ratios, mean_kl, row_mean
from tandem.algorithms.tokens import under_mask


def gspo(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clip of ``s = (pi / pi_old)^(1 / length)`` (arXiv 2507.18071, eq. 5-7).

    Written per token as the paper's GSPO-token: token t has the value of ``s`` and the gradient of
    its own log-probability, the same sum when a row's advantages are equal. Use it with
    ``seq-mean-token-mean``.
    """
    check_clip(clip_low, clip_high)
    log_ratio = log_ratios(logprobs_BT, old_logprobs_BT, mask_BT)
    advantages = under_mask(advantages_BT.detach(), mask_BT)
    own = log_ratio - log_ratio.detach()
    ratio = (row_mean(log_ratio, mask_BT).detach() + own).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    stats = {"pg_clipfrac": clipped > plain, "ppo_kl": mean_kl(log_ratio), "ratio": ratio.detach()}
    return under_mask(torch.maximum(plain, clipped), mask_BT), stats


def gmpo(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``-A`` times the geometric mean of token ratios, each clipped in log space against the
    advantage's sign (arXiv 2507.20673). Use it with ``seq-mean-token-mean``."""
    check_clip(clip_low, clip_high)
    log_ratio = log_ratios(logprobs_BT, old_logprobs_BT, mask_BT)
    advantages = under_mask(advantages_BT.detach(), mask_BT)
    sign = advantages.sign()
    bounded = torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-clip_low, clip_high)) * sign
    ratio = row_mean(bounded, mask_BT).exp()
    loss = (-row_mean(advantages, mask_BT) * ratio).expand_as(log_ratio)
    stats = {
        "pg_clipfrac": bounded.detach() != log_ratio.detach(),
        "ppo_kl": mean_kl(log_ratio),
        "ratio": ratio.detach().expand_as(log_ratio),
    }
    return under_mask(loss, mask_BT), stats
