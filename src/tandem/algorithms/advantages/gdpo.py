"""Several rewards: each is normalised in its group before they are added (arXiv 2601.05242)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from tandem.algorithms.advantages.groups import group_rewards
from tandem.algorithms.advantages.grpo import grpo
from tandem.algorithms.tokens import Reduce, identity, masked_whiten
from tandem.errors import ConfigError, DataError


def gdpo(
    rewards_B: Tensor,
    group_ids_B: Tensor,
    *,
    reward_parts: Tensor,
    weights: Sequence[float] | None = None,
    ddof: Literal[0, 1] = 1,
    eps: float = 1e-6,
    normalise_batch: bool = True,
    reduce: Reduce = identity,
) -> Tensor:
    """Weighted sum over ``reward_parts [B, K]`` of GRPO advantages, normalised over responses.

    The last normalisation counts every response once, not every token, and divides by the spread,
    at least ``eps``. Rows whose overall reward
    or any part is missing are left out and get 0.
    """
    if reward_parts.dim() != 2 or reward_parts.shape[0] != rewards_B.shape[0]:
        raise DataError(
            f"reward_parts: got shape {tuple(reward_parts.shape)}, "
            f"expected [{rewards_B.shape[0]}, K]"
        )
    num_parts = reward_parts.shape[1]
    scales = [1.0] * num_parts if weights is None else list(weights)
    if len(scales) != num_parts:
        raise ConfigError(f"weights: got {len(scales)} values, expected one a part: {num_parts}")
    valid = rewards_B.isfinite() & reward_parts.isfinite().all(dim=1)
    total = torch.zeros_like(reward_parts[:, 0])
    for scale, part_B in zip(scales, reward_parts.unbind(dim=1), strict=True):
        part_B = torch.where(valid, part_B, torch.nan)
        total = total + scale * grpo(part_B, group_ids_B, ddof=ddof, eps=eps)
    if normalise_batch:
        floor = eps * eps
        total = masked_whiten(
            total, valid, ddof=ddof, eps=floor, form="rsqrt(max(var,eps))", reduce=reduce
        )
    checked = torch.where(valid, total, torch.nan)
    return group_rewards(checked, group_ids_B).where_valid(total, rewards_B.dtype)
