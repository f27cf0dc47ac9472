"""Rewards for the best of k samples. The measure pass@k is in ``accuracy``."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tandem.algorithms.advantages.groups import group_rewards


def grpo_passk(
    rewards_B: Tensor,
    group_ids_B: Tensor,
    *,
    std: bool = True,
    ddof: Literal[0, 1] = 1,
    eps: float = 1e-6,
) -> Tensor:
    """Only the best sample learns: ``(r_best - r_second) / (std + eps)`` (arXiv 2503.19595).

    A tie for the best gives 0 to all.
    """
    groups = group_rewards(rewards_B, group_ids_B)
    r = torch.where(groups.valid_B, groups.rewards_B, -torch.inf)

    def best(values_B: Tensor) -> Tensor:
        start = values_B.new_full((groups.num_groups,), -torch.inf)
        return start.scatter_reduce_(0, groups.index_B, values_B, "amax")[groups.index_B]

    is_best = r == best(r)
    is_unique = groups.sum_of(is_best.double()) == 1
    gap = r - best(torch.where(is_best, -torch.inf, r))
    advantages = torch.where(is_best & is_unique, gap, 0.0)
    if std:
        advantages = advantages / (groups.std(ddof) + eps)
    return groups.where_informative(advantages, rewards_B.dtype)
