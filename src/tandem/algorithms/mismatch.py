"""How far the sampler's log-probabilities are from the train engine's, for equal weights.

What belongs here: diagnostics. What does not: corrections that change the loss (``correction``).
"""

from __future__ import annotations

from torch import Tensor

from tandem.algorithms.tokens import clamped_ratio


def mismatch_metrics(
    train_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor
) -> dict[str, float]:
    """Divergence of sampler and trainer over the mask, with ``d = train - sampler``.

    ``mismatch/kl`` is k1 ``mean(-d)`` and ``mismatch/k3`` is ``mean(exp(d) - 1 - d)``, both
    KL(sampler || trainer); ``ess`` is ``(sum w)^2 / (n sum w^2)`` for ``w = exp(d)``, in (0, 1].
    An empty mask has no values: an empty dict.
    """
    d = (train_logprobs - sampler_logprobs).detach()[mask.bool()].double()
    if not d.numel():
        return {}
    w = clamped_ratio(d)
    return {
        "mismatch/kl": float(-d.mean()),
        "mismatch/k3": float((w - 1.0 - d).mean()),
        "mismatch/logprob_abs_diff": float(d.abs().mean()),
        "mismatch/logprob_abs_diff_max": float(d.abs().max()),
        "mismatch/ess": float(w.sum() ** 2 / (d.numel() * (w * w).sum())),
    }
