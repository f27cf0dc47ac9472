"""The names of the advantage estimators. What does not belong here: anything else."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tandem.algorithms.advantages.distilled import (
    none,
    teacher_forward_kl,
    teacher_reverse_kl,
)
from tandem.algorithms.advantages.gae import gae_advantages
from tandem.algorithms.advantages.gdpo import gdpo
from tandem.algorithms.advantages.grpo import dr_grpo, grpo, grpo_loo
from tandem.algorithms.advantages.pass_at_k import grpo_passk
from tandem.algorithms.advantages.reinforce import reinforce, remax
from tandem.algorithms.advantages.reinforce_plus_plus import (
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
)
from tandem.algorithms.advantages.reweighted import gpg, maxrl, opo
from tandem.algorithms.advantages.rloo import rloo

ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "grpo_loo": grpo_loo,
    "grpo_passk": grpo_passk,
    "rloo": rloo,
    "reinforce": reinforce,
    "remax": remax,
    "opo": opo,
    "gpg": gpg,
    "maxrl": maxrl,
    "gdpo": gdpo,
    "none": none,
}
"""``estimate(rewards_B, group_ids_B, **kwargs) -> advantages_B``: one number per trajectory."""

EXTRA_INPUTS: dict[str, tuple[str, ...]] = {
    "remax": ("greedy_rewards",),
    "opo": ("lengths",),
    "gdpo": ("reward_parts",),
}
"""Further inputs, passed by keyword: ``lengths`` is counted from ``loss_mask``, the others are
batch keys."""

TOKEN_ADVANTAGES: dict[str, Callable[..., dict[str, Tensor]]] = {
    "gae": gae_advantages,
    "reinforce++": reinforce_plus_plus_advantages,
    "reinforce++_baseline": reinforce_plus_plus_baseline_advantages,
    "teacher_reverse_kl": teacher_reverse_kl,
    "teacher_forward_kl": teacher_forward_kl,
}
"""``estimate(inputs, **kwargs) -> {"advantages": [B, T], ...}`` from the keys of the batch."""

TOKENWISE = frozenset({"teacher_reverse_kl", "teacher_forward_kl"})
"""Those of them that look at each token alone, so that a trajectory may have several rows."""

TOKEN_INPUTS = (
    "loss_mask",
    "rewards",
    "group_ids",
    "token_rewards",
    "values",
    "bootstrap_values",
    "prox_logprobs",
    "teacher_logprobs",
)
