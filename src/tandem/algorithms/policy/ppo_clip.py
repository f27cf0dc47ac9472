"""PPO's clipped surrogate, with separate bounds and the optional dual clip."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.policy.ratios import log_ratios, mean_kl
from tandem.algorithms.tokens import under_mask
from tandem.errors import ConfigError


def ppo_clip(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``max(-A r, -A clip(r, 1 - low, 1 + high))`` (arXiv 1707.06347, eq. 7; the two bounds: DAPO,
    arXiv 2503.14476). ``dual_clip`` = c > 1 bounds the loss by ``-c A`` where A < 0 (1912.09729).

    ``pg_clipfrac`` is the fraction of tokens whose gradient a clip removed.
    """
    check_clip(clip_low, clip_high)
    if dual_clip is not None and not dual_clip > 1:
        raise ConfigError(f"dual_clip: got {dual_clip!r}, allowed: None or a number > 1")
    log_ratio = log_ratios(logprobs_BT, old_logprobs_BT, mask_BT)
    advantages = under_mask(advantages_BT.detach(), mask_BT)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(plain, clipped)
    stats = {"pg_clipfrac": clipped > plain, "ppo_kl": mean_kl(log_ratio)}
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        is_capped = (advantages < 0) & (loss > ceiling)
        loss = torch.where(is_capped, ceiling, loss)
        stats["pg_clipfrac_dual"] = is_capped
    return under_mask(loss, mask_BT), stats


def check_clip(clip_low: float, clip_high: float) -> None:
    for name, value in (("clip_low", clip_low), ("clip_high", clip_high)):
        if not value >= 0:
            raise ConfigError(f"{name}: got {value!r}, allowed: a number >= 0")
