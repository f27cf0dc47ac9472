"""Generalised advantage estimation over the trained tokens of a row."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tandem.algorithms.shaping import rewards_on_trained_tokens, score_on_last_token
from tandem.algorithms.tokens import Reduce, identity, masked_whiten, under_mask
from tandem.errors import DataError


def gae(
    token_rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap_values_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, 0 outside the mask (arXiv 1506.02438, eq. 16).

    ``A_t = delta_t + gamma * lam * A_next``, ``delta_t = r_t + gamma * V_next - V_t``, where *next*
    is the next trained token: observation tokens are no time steps, and a reward on one belongs to
    the trained token before it. After the last trained token the value is ``bootstrap_values_B``,
    0 by default: the row ended. Give the next state's value for rows cut by a length limit.
    """
    mask = mask_BT.bool()
    rewards = rewards_on_trained_tokens(token_rewards_BT, mask)
    values = under_mask(values_BT, mask)
    next_value = torch.zeros_like(values[:, 0])
    if bootstrap_values_B is not None:
        next_value = bootstrap_values_B.to(values.dtype)
    carried = torch.zeros_like(next_value)
    columns = []
    for t in reversed(range(mask.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        carried = torch.where(mask[:, t], delta + gamma * lam * carried, carried)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        columns.append(carried)
    advantages = under_mask(torch.stack(columns[::-1], dim=1), mask)
    return advantages, advantages + values


def gae_advantages(
    inputs: Mapping[str, Tensor],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = True,
    reduce: Reduce = identity,
) -> dict[str, Tensor]:
    """GAE from a batch's keys: ``values``, ``token_rewards`` or ``rewards``, and for truncated rows
    ``bootstrap_values`` (0 for rows that ended). ``whiten`` normalises over all trained tokens."""
    if "values" not in inputs:
        raise DataError("values: missing from the batch, required by gae; run the critic first")
    mask = inputs["loss_mask"].bool()
    advantages, returns = gae(
        token_rewards_of(inputs, "gae"),
        inputs["values"],
        mask,
        gamma=gamma,
        lam=lam,
        bootstrap_values_B=inputs.get("bootstrap_values"),
    )
    if whiten:
        advantages = masked_whiten(advantages, mask, reduce=reduce)
    return {"advantages": advantages, "returns": returns}


def token_rewards_of(inputs: Mapping[str, Tensor], name: str) -> Tensor:
    """``token_rewards`` of the batch, else ``rewards`` put on the last trained token.

    A missing (NaN) reward counts as 0 here: there is no group to leave it out of.
    """
    if "token_rewards" in inputs:
        return inputs["token_rewards"]
    if "rewards" not in inputs:
        raise DataError(f"rewards or token_rewards: missing from the batch, required by {name}")
    return score_on_last_token(inputs["rewards"].nan_to_num(nan=0.0), inputs["loss_mask"])
