"""Policy-gradient losses that weigh ``log pi`` or the ratio smoothly: REINFORCE, CISPO, SAPO,
DPPO."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.policy.ppo_clip import check_clip
from tandem.algorithms.policy.ratios import log_ratios, mean_kl
from tandem.algorithms.tokens import under_mask
from tandem.errors import ConfigError


def reinforce_loss(
    logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """``-A log pi``; the old policy enters the metric ``ppo_kl`` only."""
    log_ratio = log_ratios(logprobs_BT, old_logprobs_BT, mask_BT)
    loss = -under_mask(advantages_BT.detach(), mask_BT) * under_mask(logprobs_BT, mask_BT)
    return loss, {"ppo_kl": mean_kl(log_ratio)}


def cispo(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``-clip(r, 1 - low, 1 + high) A log pi`` with the ratio detached (arXiv 2506.13585, eq. 4).

    Every token keeps a gradient. The bounds are around 1; some libraries take an absolute cap.
    """
    check_clip(clip_low, clip_high)
    log_ratio = log_ratios(logprobs_BT, old_logprobs_BT, mask_BT)
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -weight * under_mask(advantages_BT.detach(), mask_BT) * under_mask(logprobs_BT, mask_BT)
    return loss, {"pg_clipfrac": weight != ratio, "ppo_kl": mean_kl(log_ratio)}


def sapo(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``-A sigmoid(tau (r - 1)) 4 / tau``, a soft trust region (arXiv 2511.20347).

    ``tau_positive`` holds where A > 0. At r = 1 the gradient is that of ``-A r``.
    """
    for name, value in (("tau_positive", tau_positive), ("tau_negative", tau_negative)):
        if not value > 0:
            raise ConfigError(f"{name}: got {value!r}, allowed: a number > 0")
    log_ratio = log_ratios(logprobs_BT, old_logprobs_BT, mask_BT)
    advantages = under_mask(advantages_BT.detach(), mask_BT)
    tau = torch.full_like(advantages, tau_negative).masked_fill_(advantages > 0, tau_positive)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1.0)) * 4.0 / tau
    return -advantages * gate, {"ppo_kl": mean_kl(log_ratio)}


def dppo(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    delta_low: float = 0.15,
    delta_high: float = 0.15,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``-A r`` for tokens whose *probability* has not moved too far along A (arXiv 2602.04879).

    A token is left out when ``A > 0`` and ``p - p_old > delta_high``, or ``A < 0`` and
    ``p_old - p > delta_low`` (the total-variation form, eq. 13).
    """
    log_ratio = log_ratios(logprobs_BT, old_logprobs_BT, mask_BT)
    advantages = under_mask(advantages_BT.detach(), mask_BT)
    with torch.no_grad():
        moved = under_mask(logprobs_BT.exp() - old_logprobs_BT.exp(), mask_BT)
        dropped = ((advantages > 0) & (moved > delta_high)) | (
            (advantages < 0) & (moved < -delta_low)
        )
    loss = torch.where(dropped, 0.0, -advantages * log_ratio.exp())
    return loss.to(log_ratio.dtype), {"pg_clipfrac": dropped, "ppo_kl": mean_kl(log_ratio)}
