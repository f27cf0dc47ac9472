"""REINFORCE++ (arXiv 2501.03262): returns, or group-centred rewards, normalised over the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from tandem.algorithms.advantages.gae import token_rewards_of
from tandem.algorithms.advantages.groups import group_rewards
from tandem.algorithms.shaping import rewards_on_trained_tokens
from tandem.algorithms.tokens import Reduce, identity, masked_whiten, under_mask
from tandem.errors import ConfigError, DataError


def discounted_returns(token_rewards_BT: Tensor, mask_BT: Tensor, *, gamma: float = 1.0) -> Tensor:
    """``R_t = r_t + gamma * R_next`` over the trained tokens; observations pass it on unchanged."""
    mask = mask_BT.bool()
    rewards = rewards_on_trained_tokens(token_rewards_BT, mask)
    carried = torch.zeros_like(rewards[:, 0])
    columns = []
    for t in reversed(range(mask.shape[1])):
        carried = torch.where(mask[:, t], rewards[:, t] + gamma * carried, carried)
        columns.append(carried)
    return under_mask(torch.stack(columns[::-1], dim=1), mask)


def reinforce_plus_plus(
    token_rewards_BT: Tensor,
    mask_BT: Tensor,
    *,
    gamma: float = 1.0,
    ddof: Literal[0, 1] = 1,
    eps: float = 1e-8,
    reduce: Reduce = identity,
) -> tuple[Tensor, Tensor]:
    """Whitened returns, and the returns (section 3); the population is all trained tokens."""
    returns = discounted_returns(token_rewards_BT, mask_BT, gamma=gamma)
    return masked_whiten(returns, mask_BT, ddof=ddof, eps=eps, reduce=reduce), returns


def reinforce_plus_plus_baseline(
    rewards_B: Tensor,
    group_ids_B: Tensor,
    mask_BT: Tensor,
    *,
    population: Literal["tokens", "responses"] = "tokens",
    ddof: Literal[0, 1] = 1,
    eps: float = 1e-8,
    reduce: Reduce = identity,
) -> Tensor:
    """``r - group mean``, normalised over all trained tokens (long responses weigh more) or over
    all responses. Rows with a missing reward are left out and get 0."""
    groups = group_rewards(rewards_B, group_ids_B)
    centred = groups.where_informative(groups.rewards_B - groups.mean_B, rewards_B.dtype)
    mask = mask_BT.bool() & groups.valid_B[:, None]
    spread = centred[:, None].expand(mask.shape)
    if population == "tokens":
        return masked_whiten(spread, mask, ddof=ddof, eps=eps, reduce=reduce)
    if population != "responses":
        raise ConfigError(f"population: got {population!r}, allowed: tokens, responses")
    trained = groups.valid_B & mask.any(dim=1)
    whitened = masked_whiten(centred, trained, ddof=ddof, eps=eps, reduce=reduce)
    return under_mask(whitened[:, None].expand(mask.shape), mask)


def reinforce_plus_plus_advantages(
    inputs: Mapping[str, Tensor],
    *,
    gamma: float = 1.0,
    ddof: Literal[0, 1] = 1,
    eps: float = 1e-8,
    reduce: Reduce = identity,
) -> dict[str, Tensor]:
    """REINFORCE++ from a batch's ``token_rewards`` or ``rewards``."""
    advantages, returns = reinforce_plus_plus(
        token_rewards_of(inputs, "reinforce++"),
        inputs["loss_mask"],
        gamma=gamma,
        ddof=ddof,
        eps=eps,
        reduce=reduce,
    )
    return {"advantages": advantages, "returns": returns}


def reinforce_plus_plus_baseline_advantages(
    inputs: Mapping[str, Tensor],
    *,
    population: Literal["tokens", "responses"] = "tokens",
    ddof: Literal[0, 1] = 1,
    eps: float = 1e-8,
    reduce: Reduce = identity,
) -> dict[str, Tensor]:
    """REINFORCE++ with the group's mean as baseline, from ``rewards`` and ``group_ids``."""
    for key in ("rewards", "group_ids"):
        if key not in inputs:
            raise DataError(f"{key}: missing from the batch, required by reinforce++_baseline")
    advantages = reinforce_plus_plus_baseline(
        inputs["rewards"].float(),
        inputs["group_ids"],
        inputs["loss_mask"],
        population=population,
        ddof=ddof,
        eps=eps,
        reduce=reduce,
    )
    return {"advantages": advantages}
