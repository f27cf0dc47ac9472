"""Rewards per token: where a score sits, penalties added to it.

What does not belong here: advantage estimators, reward functions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.kl import kl_estimate
from tandem.algorithms.tokens import under_mask
from tandem.errors import ConfigError, DataError


def score_on_last_token(scores_B: Tensor, mask_BT: Tensor) -> Tensor:
    """Token rewards ``[B, T]`` with the score on the last trained token of each row, else 0.

    A row without a trained token has nowhere to put it: all 0.
    """
    mask = mask_BT.bool()
    if scores_B.shape != mask.shape[:1]:
        raise DataError(f"scores: got shape {tuple(scores_B.shape)}, expected [{mask.shape[0]}]")
    return torch.where(_is_last(mask), scores_B[:, None], 0.0).to(scores_B.dtype)


def rewards_on_trained_tokens(token_rewards_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Rewards of untrained tokens moved to the trained token before them; the sum is kept.

    NaN and infinite entries outside the mask are junk and count as 0, and so do rewards before the
    first trained token, which no action earned.
    """
    mask = mask_BT.bool()
    usable = mask | token_rewards_BT.isfinite()
    rewards = under_mask(token_rewards_BT, usable)
    position = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    owner = torch.where(mask, position, -1).cummax(dim=1).values
    rewards = torch.where(owner >= 0, rewards, 0.0)
    return torch.zeros_like(rewards).scatter_add_(1, owner.clamp(min=0), rewards)


def kl_shaped_rewards(
    scores_B: Tensor,
    logprobs_BT: Tensor,
    ref_logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    beta: float,
    estimator: str = "k1",
) -> Tensor:
    """``-beta * KL_t``, plus the score on the last trained token (arXiv 1909.08593, eq. 2)."""
    kl = kl_estimate(
        under_mask(logprobs_BT, mask_BT), under_mask(ref_logprobs_BT, mask_BT), estimator
    )
    return score_on_last_token(scores_B, mask_BT).to(kl.dtype) - beta * under_mask(kl, mask_BT)


def overlong_penalty(
    lengths_B: Tensor, *, max_length: int, cache: int, factor: float = 1.0
) -> Tensor:
    """0 up to ``max_length - cache`` tokens, then linearly to ``-factor``.

    DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13).
    """
    if not 0 < cache <= max_length:
        raise ConfigError(f"cache: got {cache}, allowed: 1 to max_length, {max_length}")
    excess = lengths_B.double() - (max_length - cache)
    return -factor * (excess / cache).clamp(0.0, 1.0)


def trajectory_sums(values_BT: Tensor, mask_BT: Tensor, sample_ids_B: Tensor) -> Tensor:
    """Sum over the mask of all rows of each row's trajectory, ``[B]``."""
    _, index_B = torch.unique(sample_ids_B, return_inverse=True)
    rows_B = under_mask(values_BT, mask_BT).sum(dim=1)
    return torch.zeros_like(rows_B).index_add_(0, index_B, rows_B)[index_B]


def _is_last(mask_BT: Tensor) -> Tensor:
    remaining = mask_BT.flip(1).cumsum(dim=1).flip(1)
    return mask_BT & (remaining == 1)
