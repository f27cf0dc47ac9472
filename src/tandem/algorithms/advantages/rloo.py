"""REINFORCE with the mean of the other samples as baseline."""

from __future__ import annotations

from torch import Tensor

from tandem.algorithms.advantages.groups import group_rewards


def rloo(rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """``r_i - mean_{j != i} r_j`` (arXiv 2402.14740); a group of one has no baseline: 0."""
    groups = group_rewards(rewards_B, group_ids_B)
    scale = groups.count_B / (groups.count_B - 1).clamp(min=1)
    return groups.where_informative((groups.rewards_B - groups.mean_B) * scale, rewards_B.dtype)
