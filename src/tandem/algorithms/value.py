"""The critic's loss. What does not belong here: advantages and returns."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.tokens import under_mask
from tandem.errors import ConfigError


def value_loss(
    values_BT: Tensor,
    old_values_BT: Tensor,
    returns_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``max((v - R)^2, (v_old + clip(v - v_old, -c, c) - R)^2) / 2`` per token, 0 outside the mask.

    ``clip=None`` leaves out the second term. ``vf_clipfrac`` marks tokens where it is the larger.
    """
    if clip is not None and not clip > 0:
        raise ConfigError(f"clip: got {clip!r}, allowed: None or a number > 0")
    values = under_mask(values_BT, mask_BT)
    returns = under_mask(returns_BT.detach(), mask_BT)
    plain = (values - returns) ** 2
    if clip is None:
        return 0.5 * plain, {}
    old = under_mask(old_values_BT.detach(), mask_BT)
    bounded = (old + (values - old).clamp(-clip, clip) - returns) ** 2
    return 0.5 * torch.maximum(plain, bounded), {"vf_clipfrac": bounded > plain}
