"""How far the sampler's log-probabilities are from the train engine's, for equal weights.

What belongs here: diagnostics. What does not: corrections that change the loss (``correction``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.tokens import clamped_ratio, under_mask
from tandem.types import Metric


def mismatch_metrics(
    train_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor
) -> dict[str, Metric]:
    """Divergence of sampler and trainer over the mask, with ``d = train - sampler``.

    ``mismatch/kl`` is k1 ``mean(-d)`` and ``mismatch/k3`` is ``mean(exp(d) - 1 - d)``, both
    KL(sampler || trainer); ``ess`` is ``(sum w)^2 / (n sum w^2)`` for ``w = exp(d)``, in (0, 1].
    """
    mask = mask.bool()
    d = under_mask((train_logprobs - sampler_logprobs).detach().double(), mask)
    count = mask.sum(dtype=torch.float64)
    num = count.clamp(min=1)
    w = under_mask(clamped_ratio(d), mask)
    largest = d.abs().max() if d.numel() else d.new_zeros(())
    ess = w.sum() ** 2 / (num * (w * w).sum()).clamp(min=torch.finfo(torch.float64).tiny)
    return {
        "mismatch/kl": Metric(-d.sum() / num, count),
        "mismatch/k3": Metric(under_mask(w - 1.0 - d, mask).sum() / num, count),
        "mismatch/logprob_abs_diff": Metric(d.abs().sum() / num, count),
        "mismatch/logprob_abs_diff_max": Metric(largest, count, "max"),
        "mismatch/ess": Metric(ess, count),
    }
