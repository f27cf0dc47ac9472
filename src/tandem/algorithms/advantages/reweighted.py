"""Group baselines that weigh samples: by length (OPO), by what is informative (GPG), by the success
rate (MaxRL)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tandem.algorithms.advantages.groups import group_rewards
from tandem.algorithms.tokens import Reduce, identity
from tandem.errors import ConfigError, DataError


def opo(rewards_B: Tensor, group_ids_B: Tensor, *, lengths: Tensor) -> Tensor:
    """``r`` less the length-weighted mean of the group (OPO, arXiv 2505.23585)."""
    groups = group_rewards(rewards_B, group_ids_B)
    lengths_B = lengths.double()
    total = groups.sum_of(lengths_B)
    baseline = groups.sum_of(lengths_B * groups.rewards_B) / total.clamp(min=1)
    return groups.where_informative(groups.rewards_B - baseline, rewards_B.dtype)


def gpg(
    rewards_B: Tensor,
    group_ids_B: Tensor,
    *,
    f_norm: float = 1.0,
    live: Literal["groups", "rewards"] = "groups",
    reduce: Reduce = identity,
) -> Tensor:
    """``alpha * (r - mean) / f_norm`` with ``alpha = samples / live samples`` (arXiv 2504.02546).

    Live are the samples of groups whose rewards differ, as in the paper; ``live="rewards"`` counts
    non-zero rewards instead, which differs once a group is all right.
    """
    groups = group_rewards(rewards_B, group_ids_B)
    if live == "groups":
        is_live = groups.informative_B & groups.valid_B
    elif live == "rewards":
        is_live = groups.rewards_B != 0
    else:
        raise ConfigError(f"live: got {live!r}, allowed: groups, rewards")
    counts = torch.stack([groups.valid_B.sum(), is_live.sum()]).double()
    total, num_live = reduce(counts).unbind()
    alpha = total / num_live.clamp(min=1)
    return groups.where_informative(
        alpha * (groups.rewards_B - groups.mean_B) / f_norm, rewards_B.dtype
    )


def maxrl(rewards_B: Tensor, group_ids_B: Tensor, *, eps: float = 1e-6) -> Tensor:
    """``(r - mean) / (mean + eps)`` within the group (MaxRL); rewards must not be negative."""
    groups = group_rewards(rewards_B, group_ids_B)
    if bool((groups.rewards_B < 0).any()):
        raise DataError(
            f"rewards: got {float(groups.rewards_B.min())}, maxrl divides by the group's mean and "
            "needs rewards >= 0; use grpo or shift the reward"
        )
    advantages = (groups.rewards_B - groups.mean_B) / (groups.mean_B + eps)
    return groups.where_informative(advantages, rewards_B.dtype)
