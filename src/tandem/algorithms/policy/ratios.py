"""What every policy loss starts from: log-ratios of the trained tokens. No losses here."""

from __future__ import annotations

from torch import Tensor

from tandem.algorithms.tokens import MAX_LOG_RATIO, under_mask


def log_ratios(logprobs_BT: Tensor, old_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """``log pi - log pi_old`` within ±20 under the mask, else 0; no gradient to the old policy."""
    current = under_mask(logprobs_BT, mask_BT)
    old = under_mask(old_logprobs_BT.detach(), mask_BT)
    return (current - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def mean_kl(log_ratio: Tensor) -> Tensor:
    """Per-token k1 of KL(pi_old || pi), detached: the metric ``ppo_kl``."""
    return -log_ratio.detach()


def row_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean over the trained tokens of each row, ``[B, 1]``; 0 for a row without any."""
    count = mask_BT.bool().sum(dim=1, keepdim=True).clamp(min=1)
    return under_mask(values_BT, mask_BT).sum(dim=1, keepdim=True) / count
