"""Statistics of the rewards of one prompt's samples, grouped by id and never by position.

What does not belong here: the estimators, which are one file each beside this one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.errors import DataError

NOISE = 1e-6
"""A spread of rewards below this fraction of the largest one is rounding, not signal."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Rewards (float64, missing ones 0) with what each row needs to know of its group.

    ``valid``: the reward is a finite number. ``informative``: the group has two or more valid
    rewards that differ; elsewhere every group-relative advantage is exactly 0.
    """

    rewards_B: Tensor
    valid_B: Tensor
    index_B: Tensor
    num_groups: int
    count_B: Tensor
    mean_B: Tensor
    informative_B: Tensor

    def sum_of(self, values_B: Tensor) -> Tensor:
        """Sum over the valid rows of each row's group, ``[B]``."""
        values_B = torch.where(self.valid_B, values_B, 0.0)
        return values_B.new_zeros(self.num_groups).index_add_(0, self.index_B, values_B)[
            self.index_B
        ]

    def std(self, ddof: int) -> Tensor:
        """Standard deviation of each row's group, ``[B]``; 0 where it is not defined."""
        squares = self.sum_of((self.rewards_B - self.mean_B) ** 2)
        return (squares / (self.count_B - ddof).clamp(min=1)).sqrt()

    def where_informative(self, advantages_B: Tensor, dtype: torch.dtype) -> Tensor:
        """Advantages of valid rows of informative groups; exactly 0 for all others."""
        keep = self.informative_B & self.valid_B
        return torch.where(keep, advantages_B, 0.0).to(dtype)

    def where_valid(self, advantages_B: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.where(self.valid_B, advantages_B, 0.0).to(dtype)


def group_rewards(rewards_B: Tensor, group_ids_B: Tensor) -> Groups:
    """Group statistics; NaN and infinite rewards are left out of them."""
    if rewards_B.dim() != 1 or rewards_B.shape != group_ids_B.shape:
        raise DataError(
            f"rewards, group_ids: got shapes {tuple(rewards_B.shape)} and "
            f"{tuple(group_ids_B.shape)}, expected [B] both"
        )
    if not rewards_B.is_floating_point():
        raise DataError(f"rewards: got dtype {rewards_B.dtype}, expected a floating-point one")
    values = rewards_B.double()
    valid = values.isfinite()
    unique, index = torch.unique(group_ids_B, return_inverse=True)
    num_groups = unique.numel()
    zeroed = torch.where(valid, values, 0.0)

    def per_group(source: Tensor, op: str, empty: float) -> Tensor:
        start = values.new_full((num_groups,), empty)
        return start.scatter_reduce_(0, index, source, op, include_self=True)[index]

    count = per_group(valid.double(), "sum", 0.0)
    mean = per_group(zeroed, "sum", 0.0) / count.clamp(min=1)
    high = per_group(torch.where(valid, values, -torch.inf), "amax", -torch.inf)
    low = per_group(torch.where(valid, values, torch.inf), "amin", torch.inf)
    spread = high - low
    informative = (count >= 2) & (spread > NOISE * torch.maximum(high.abs(), low.abs()))
    return Groups(zeroed, valid, index, num_groups, count, mean, informative)
