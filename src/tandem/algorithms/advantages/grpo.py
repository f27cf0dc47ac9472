"""GRPO and its relatives: rewards relative to the group's mean, with or without its spread."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tandem.algorithms.advantages.groups import NOISE, group_rewards
from tandem.algorithms.tokens import Reduce, identity, masked_var
from tandem.errors import ConfigError

StdScope = Literal["group", "batch", "none"]


def grpo(
    rewards_B: Tensor,
    group_ids_B: Tensor,
    *,
    std: StdScope = "group",
    ddof: Literal[0, 1] = 1,
    eps: float = 1e-6,
    reduce: Reduce = identity,
) -> Tensor:
    """``(r - mean) / (std + eps)`` within the group (DeepSeekMath, arXiv 2402.03300, 4.1.2).

    The paper states neither ``ddof`` nor ``eps``. ``std="batch"`` divides by the spread of all
    rewards (arXiv 2508.08221), ``"none"`` not at all. Groups of one and groups of equal rewards
    give exactly 0; some other libraries return the raw reward of a group of one.
    """
    groups = group_rewards(rewards_B, group_ids_B)
    centred = groups.rewards_B - groups.mean_B
    if std == "group":
        centred = centred / (groups.std(ddof) + eps)
    elif std == "batch":
        var = masked_var(groups.rewards_B, groups.valid_B, ddof=ddof, reduce=reduce)
        centred = centred / (var.sqrt() + eps)
    elif std != "none":
        raise ConfigError(f"std: got {std!r}, allowed: group, batch, none")
    return groups.where_informative(centred, rewards_B.dtype)


def dr_grpo(rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """``r - mean`` within the group (Dr. GRPO, arXiv 2503.20783)."""
    return grpo(rewards_B, group_ids_B, std="none")


def grpo_loo(rewards_B: Tensor, group_ids_B: Tensor, *, eps: float = 1e-6) -> Tensor:
    """GRPO with mean and spread (ddof 1) of the *other* samples of the group.

    Where the others all agree, or there is only one, the difference stays unscaled.
    """
    groups = group_rewards(rewards_B, group_ids_B)
    r, others = groups.rewards_B, (groups.count_B - 1).clamp(min=1)
    mean = (groups.mean_B * groups.count_B - r) / others
    # Sum of squares about the others' mean, from the group's by removing one row (Welford).
    total = groups.sum_of((r - groups.mean_B) ** 2)
    squares = total - (r - groups.mean_B) * (r - mean)
    scales = (others > 1) & (squares > NOISE**2 * total)
    spread = (squares.clamp(min=0) / (others - 1).clamp(min=1)).sqrt()
    advantages = (r - mean) / torch.where(scales, spread + eps, torch.ones_like(spread))
    return groups.where_informative(advantages, rewards_B.dtype)
