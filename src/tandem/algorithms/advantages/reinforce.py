"""Plain REINFORCE: the reward itself, or the reward less a baseline that knows no groups."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from tandem.algorithms.advantages.groups import group_rewards
from tandem.algorithms.tokens import Reduce, identity, masked_mean
from tandem.errors import ConfigError, DataError


def reinforce(
    rewards_B: Tensor,
    group_ids_B: Tensor,
    *,
    baseline: Literal["batch", "none"] = "batch",
    reduce: Reduce = identity,
) -> Tensor:
    """``r`` less the mean of all valid rewards (``baseline="batch"``), or ``r`` as it is."""
    groups = group_rewards(rewards_B, group_ids_B)
    if baseline == "none":
        return groups.where_valid(groups.rewards_B, rewards_B.dtype)
    if baseline != "batch":
        raise ConfigError(f"baseline: got {baseline!r}, allowed: batch, none")
    mean = masked_mean(groups.rewards_B, groups.valid_B, reduce=reduce)
    return groups.where_valid(groups.rewards_B - mean, rewards_B.dtype)


def remax(rewards_B: Tensor, group_ids_B: Tensor, *, greedy_rewards: Tensor) -> Tensor:
    """``r(sample) - r(greedy completion of the same prompt)`` (ReMax, arXiv 2310.10505)."""
    if greedy_rewards.shape != rewards_B.shape:
        raise DataError(
            f"greedy_rewards: got shape {tuple(greedy_rewards.shape)}, "
            f"expected {tuple(rewards_B.shape)}"
        )
    groups = group_rewards(rewards_B - greedy_rewards, group_ids_B)
    return groups.where_valid(groups.rewards_B, rewards_B.dtype)
