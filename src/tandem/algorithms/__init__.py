"""Algorithms as pure functions of tensors: advantages, losses, weights, corrections.

One short file a family and one literal table of names (``ADVANTAGES``, ``POLICY_LOSSES``,
``CORRECTIONS``, ``KL_ESTIMATORS``, ``LOSSES``). Sums over data-parallel ranks are injected, so
nothing here knows processes, engines or configuration files.
"""

from tandem.algorithms.advantages import ADVANTAGES, TOKEN_ADVANTAGES, assign_advantages
from tandem.algorithms.aggregation import AGGREGATION_MODES, loss_weights
from tandem.algorithms.correction import CORRECTIONS, behaviour_correction
from tandem.algorithms.kl import KL_ESTIMATORS, AdaptiveKL, kl_estimate
from tandem.algorithms.mismatch import mismatch_metrics
from tandem.algorithms.objective import PolicyObjective
from tandem.algorithms.policy import POLICY_LOSSES
from tandem.algorithms.preference_objective import KTOObjective, PairObjective, RewardObjective
from tandem.algorithms.registry import LOSSES, get_loss
from tandem.algorithms.sft import sft_loss
from tandem.algorithms.tokens import logprobs_and_entropy, masked_mean, masked_var, masked_whiten
from tandem.algorithms.value import ValueObjective

__all__ = [
    "ADVANTAGES",
    "AGGREGATION_MODES",
    "CORRECTIONS",
    "KL_ESTIMATORS",
    "LOSSES",
    "POLICY_LOSSES",
    "TOKEN_ADVANTAGES",
    "AdaptiveKL",
    "KTOObjective",
    "PairObjective",
    "PolicyObjective",
    "RewardObjective",
    "ValueObjective",
    "assign_advantages",
    "behaviour_correction",
    "get_loss",
    "kl_estimate",
    "logprobs_and_entropy",
    "loss_weights",
    "masked_mean",
    "masked_var",
    "masked_whiten",
    "mismatch_metrics",
    "sft_loss",
]
