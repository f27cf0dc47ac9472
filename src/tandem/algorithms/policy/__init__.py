"""Policy losses per token: one short file a family, and the table of their names.

Each is ``loss(logprobs, old_logprobs, advantages, mask, **params) -> (loss_BT, stats)``; ``stats``
are per-token, detached and averaged over trained tokens under their name.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tandem.algorithms.policy.covariance import clip_cov, kl_cov
from tandem.algorithms.policy.ppo_clip import ppo_clip
from tandem.algorithms.policy.sequence import gmpo, gspo
from tandem.algorithms.policy.weighted import cispo, dppo, reinforce_loss, sapo

POLICY_LOSSES: dict[str, Callable[..., tuple[Tensor, dict[str, Tensor]]]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "dppo": dppo,
    "reinforce": reinforce_loss,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}

POLICY_BATCH_KEYS: dict[str, tuple[str, ...]] = {
    "clip_cov": ("cov_selected",),
    "kl_cov": ("cov_selected",),
}
"""Per-token batch keys passed to a loss by keyword, beside the usual ones."""

__all__ = [
    "POLICY_BATCH_KEYS",
    "POLICY_LOSSES",
    "cispo",
    "clip_cov",
    "dppo",
    "gmpo",
    "gspo",
    "kl_cov",
    "ppo_clip",
    "reinforce_loss",
    "sapo",
]
