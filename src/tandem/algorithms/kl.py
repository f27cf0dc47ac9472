"""Divergence from a reference policy: per-token estimators, their gradients, the coefficient.

For a token drawn from pi, with ``d = log pi - log ref`` (Schulman, "Approximating KL divergence"):

==== ===================== ======================================================
name value                 expected gradient of the value, used as a loss
==== ===================== ======================================================
k1   d                     0 (pulls nowhere)
k2   d^2 / 2               the gradient of KL(pi || ref)
k3   exp(-d) - 1 + d       the gradient of KL(ref || pi)
abs  \\|d\\|                 the gradient of sum \\|pi - ref\\|
==== ===================== ======================================================

k1 and k3 are unbiased for KL(pi || ref), k2 and abs are not. A loss that adds ``+ coef * KL`` is
lowered by moving pi towards the reference. What does not belong here: where the term enters
(``objective`` as a loss, ``shaping`` as a reward).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tandem.algorithms.tokens import MAX_LOG_RATIO
from tandem.errors import ConfigError

KLEstimator = Literal["k1", "k2", "k3", "abs"]
KLGradient = Literal["auto", "own", "k2"]


def _k1(d: Tensor) -> Tensor:
    return d


def _k2(d: Tensor) -> Tensor:
    return 0.5 * d * d


def _k3(d: Tensor) -> Tensor:
    return torch.expm1(-d) + d


def _abs(d: Tensor) -> Tensor:
    return d.abs()


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": _k1,
    "k2": _k2,
    "k3": _k3,
    "abs": _abs,
}


def kl_estimate(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    estimator: str = "k3",
    *,
    gradient: KLGradient = "own",
    in_clamp: float | None = MAX_LOG_RATIO,
    out_clamp: float | None = None,
) -> Tensor:
    """Per-token estimate of KL(pi || ref); the reference gets no gradient.

    ``in_clamp`` bounds ``|d|`` and ``out_clamp`` the result; a clamped entry has gradient 0.
    ``gradient="k2"`` keeps the value and takes the gradient of k2, which is unbiased;
    ``"auto"`` does so for k1, whose own gradient pulls nowhere.
    """
    if estimator not in KL_ESTIMATORS:
        raise ConfigError(f"kl_estimator: got {estimator!r}, allowed: {', '.join(KL_ESTIMATORS)}")
    if gradient not in ("auto", "own", "k2"):
        raise ConfigError(f"kl_gradient: got {gradient!r}, allowed: auto, own, k2")
    d = logprobs - ref_logprobs.detach()
    if in_clamp is not None:
        d = d.clamp(-in_clamp, in_clamp)
    value = KL_ESTIMATORS[estimator](d)
    if out_clamp is not None:
        value = value.clamp(-out_clamp, out_clamp)
    if gradient == "k2" or (gradient == "auto" and estimator == "k1"):
        surrogate = _k2(d)
        return value.detach() + surrogate - surrogate.detach()
    return value


def kl_importance_weighted(
    logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, *, estimator: str = "k3"
) -> Tensor:
    """``(pi / pi_old) * estimate``: unbiased for tokens drawn from ``pi_old``, value and gradient.

    The gradient flows through the ratio (DeepSeek-V3.2, arXiv 2512.02556).
    """
    log_ratio = (logprobs - old_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.exp() * kl_estimate(logprobs, ref_logprobs, estimator)


@dataclass(frozen=True, slots=True)
class AdaptiveKL:
    """A coefficient that steers the measured KL to ``target`` (arXiv 1909.08593, section 2.2)."""

    coef: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        for name in ("target", "horizon"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"AdaptiveKL.{name}: got {getattr(self, name)!r}, allowed: > 0")

    def updated(self, kl: float, num_samples: int) -> AdaptiveKL:
        """The controller after ``num_samples`` samples with mean divergence ``kl``:
        ``coef * (1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon)``."""
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        coef = self.coef * (1.0 + error * num_samples / self.horizon)
        return AdaptiveKL(coef, self.target, self.horizon)
