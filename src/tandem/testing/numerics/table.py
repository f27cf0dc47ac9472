"""The algorithm names of a numerics file. What does not belong here: anything else."""

from __future__ import annotations

from collections.abc import Callable

from tandem.algorithms.advantages.grpo import dr_grpo, grpo_loo
from tandem.algorithms.advantages.pass_at_k import grpo_passk
from tandem.algorithms.advantages.reweighted import maxrl
from tandem.algorithms.advantages.rloo import rloo
from tandem.testing.numerics.advantages import (
    check_adaptive_kl,
    check_gae,
    check_gae_whitened,
    check_gdpo,
    check_gpg,
    check_grpo,
    check_opo,
    check_overlong,
    check_reinforce_plus_plus,
    check_reinforce_plus_plus_baseline,
    check_remax,
    check_token_reward,
    outcome,
)
from tandem.testing.numerics.case import Case, Results
from tandem.testing.numerics.corrections import (
    check_decoupled,
    check_icepop,
    check_mis,
    check_mismatch,
    check_prox_approx,
    check_seq_mask_tis,
    check_tis,
    check_veto,
)
from tandem.testing.numerics.losses import (
    PPO_NAMES,
    check_aggregation,
    check_clip_cov,
    check_dppo,
    check_gspo,
    check_kl_cov,
    policy,
)
from tandem.testing.numerics.machinery import (
    check_alignment,
    check_karmarkar_karp,
    check_packing,
    check_staleness,
)
from tandem.testing.numerics.optimizer import (
    check_adamw,
    check_grad_clip,
    check_lr_schedule,
    check_precision,
)
from tandem.testing.numerics.supervised import (
    check_bradley_terry,
    check_reward_model,
    check_sft,
    check_value_loss,
    preference,
)
from tandem.testing.numerics.tokens import (
    check_entropy,
    check_importance_ratio,
    check_kl,
    check_logprobs,
    check_masked_moments,
    check_whiten,
)

CHECKS: dict[str, Callable[[Case], Results]] = {
    "token_logprob+entropy": check_logprobs,
    "importance_ratio": check_importance_ratio,
    "entropy": check_entropy,
    "masked_mean": check_masked_moments,
    "masked_var": check_masked_moments,
    "masked_whiten": check_whiten,
    "gae": check_gae,
    "gae+whiten": check_gae_whitened,
    "token_reward": check_token_reward,
    "adaptive_kl": check_adaptive_kl,
    "grpo": check_grpo,
    "dr_grpo": outcome(dr_grpo),
    "grpo_loo": outcome(grpo_loo, "eps"),
    "grpo_passk": outcome(grpo_passk, "std", "ddof", "eps"),
    "rloo": outcome(rloo),
    "maxrl": outcome(maxrl, "eps"),
    "reinforce_plus_plus": check_reinforce_plus_plus,
    "reinforce_plus_plus_baseline": check_reinforce_plus_plus_baseline,
    "remax": check_remax,
    "opo": check_opo,
    "gpg": check_gpg,
    "gdpo": check_gdpo,
    "overlong_penalty": check_overlong,
    "clip_higher": policy("ppo_clip", **PPO_NAMES),
    "ppo_clip": policy("ppo_clip", **PPO_NAMES),
    "dual_clip": policy("ppo_clip", **PPO_NAMES),
    "loss_aggregation": check_aggregation,
    "gspo": check_gspo,
    "cispo": policy("cispo", clip_low="eps_low", clip_high="eps_high"),
    "sapo": policy("sapo", "seq-mean-token-mean", tau_positive="tau_pos", tau_negative="tau_neg"),
    "geo_mean": policy(
        "gmpo", "seq-mean-token-mean", clip_low="log_clip_low", clip_high="log_clip_high"
    ),
    "dppo": check_dppo,
    "clip_cov": check_clip_cov,
    "kl_cov": check_kl_cov,
    "reinforce": policy("reinforce", "seq-mean-token-sum"),
    "tis": check_tis,
    "icepop": check_icepop,
    "mis": check_mis,
    "veto": check_veto,
    "seq_mask_tis": check_seq_mask_tis,
    "mismatch": check_mismatch,
    "decoupled_ppo": check_decoupled,
    "prox_approx": check_prox_approx,
    "kl": check_kl,
    "value_loss": check_value_loss,
    "dpo": preference("sigmoid"),
    "hinge": preference("hinge"),
    "ipo": preference("ipo"),
    "bradley_terry": check_bradley_terry,
    "reward_model": check_reward_model,
    "sft": check_sft,
    "alignment": check_alignment,
    "karmarkar_karp": check_karmarkar_karp,
    "micro_batch_packing": check_packing,
    "staleness": check_staleness,
    "adamw": check_adamw,
    "precision": check_precision,
    "lr_schedule": check_lr_schedule,
    "grad_clip": check_grad_clip,
}
"""Algorithm name of a case -> its check."""
