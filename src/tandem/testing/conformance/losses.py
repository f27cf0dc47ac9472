"""The losses that the kit trains with, each in the two forms that are compared.

``loss_fn`` is what an engine is given (a sum with the batch's weights), ``per_token`` what the
plain loop aggregates by itself. The formulas of a token's loss are ``tandem.algorithms``'; whether
they are right is the numerics kit's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from tensordict import TensorDict
from torch import Tensor

from tandem.algorithms.kl import kl_estimate
from tandem.algorithms.objective import PolicyObjective
from tandem.algorithms.policy import POLICY_BATCH_KEYS, POLICY_LOSSES
from tandem.algorithms.preference import bradley_terry
from tandem.algorithms.sft import sft_loss
from tandem.algorithms.tokens import under_mask
from tandem.algorithms.value import value_loss
from tandem.types import LossFn, Metric

Outputs = Mapping[str, Tensor]
KL_COEF, ENTROPY_COEF = 0.3, 0.2


@dataclass(frozen=True, slots=True)
class LossCase:
    """One loss; ``per_row`` ones have a weight a row and no aggregation to choose."""

    name: str
    loss_fn: LossFn
    per_token: Callable[[Outputs, TensorDict], Tensor]
    per_row: bool = False


@dataclass(frozen=True)
class Weighted:
    """A loss function from a formula per token or row: ``sum(loss_weights * formula)``."""

    formula: Callable[[Outputs, TensorDict], Tensor]
    required_outputs: frozenset[str]
    keep_together: str | None = None

    def __call__(
        self, outputs: Outputs, microbatch: TensorDict
    ) -> tuple[Tensor, dict[str, Metric]]:
        return (self.formula(outputs, microbatch) * microbatch["loss_weights"]).sum(), {}


def _nll(outputs: Outputs, batch: TensorDict) -> Tensor:
    return -under_mask(outputs["train_logprobs"], batch["loss_mask"])


def _policy(name: str, outputs: Outputs, batch: TensorDict) -> Tensor:
    extra = {key: batch[key] for key in POLICY_BATCH_KEYS.get(name, ())}
    loss_BT, _ = POLICY_LOSSES[name](
        outputs["train_logprobs"],
        batch["prox_logprobs"],
        batch["advantages"],
        batch["loss_mask"],
        **extra,
    )
    return loss_BT


def _full_objective(outputs: Outputs, batch: TensorDict) -> Tensor:
    kl = kl_estimate(outputs["train_logprobs"], batch["ref_logprobs"], "k3")
    policy = _policy("ppo_clip", outputs, batch)
    return policy + KL_COEF * kl - ENTROPY_COEF * outputs["entropy"]


def _value(outputs: Outputs, batch: TensorDict) -> Tensor:
    loss_BT, _ = value_loss(
        outputs["values"], batch["old_values"], batch["returns"], batch["loss_mask"], clip=0.2
    )
    return loss_BT


def _regression(outputs: Outputs, batch: TensorDict) -> Tensor:
    return 0.5 * (outputs["scores"] - batch["target"]) ** 2


def _pairs(outputs: Outputs, batch: TensorDict) -> Tensor:
    """Half of a pair's loss at each of its rows, which lie side by side."""
    chosen, rejected = outputs["scores"][0::2], outputs["scores"][1::2]
    return (0.5 * bradley_terry(chosen, rejected)).repeat_interleave(2)


STANDARD: dict[str, LossCase] = {
    "language_model": LossCase(
        "ppo_clip with KL and entropy",
        PolicyObjective("ppo_clip", kl_coef=KL_COEF, entropy_coef=ENTROPY_COEF),
        _full_objective,
    ),
    "value_model": LossCase("value", Weighted(_value, frozenset({"values"})), _value),
    "reward_model": LossCase(
        "regression", Weighted(_regression, frozenset({"scores"})), _regression, per_row=True
    ),
}
"""The loss that checks use which are not about losses."""

LOSS_CASES: dict[str, tuple[LossCase, ...]] = {
    "language_model": (
        LossCase("sft", sft_loss, _nll),
        *(LossCase(name, PolicyObjective(name), partial(_policy, name)) for name in POLICY_LOSSES),
        STANDARD["language_model"],
    ),
    "value_model": (STANDARD["value_model"],),
    "reward_model": (
        STANDARD["reward_model"],
        LossCase(
            "bradley_terry",
            Weighted(_pairs, frozenset({"scores"}), keep_together="group_ids"),
            _pairs,
            per_row=True,
        ),
    ),
}


Change = Callable[[Tensor, dict[str, Metric], TensorDict], tuple[Tensor, dict[str, Metric]]]


class Wrapped:
    """A loss function with something to see or to change around it, and its attributes."""

    def __init__(
        self,
        loss_fn: LossFn,
        *,
        watch: Callable[[Outputs, TensorDict], None] | None = None,
        change: Change | None = None,
    ) -> None:
        self.loss_fn, self.watch, self.change = loss_fn, watch, change
        self.required_outputs = getattr(loss_fn, "required_outputs", frozenset({"train_logprobs"}))
        self.keep_together = getattr(loss_fn, "keep_together", None)

    def __call__(
        self, outputs: Outputs, microbatch: TensorDict
    ) -> tuple[Tensor, dict[str, Metric]]:
        if self.watch is not None:
            self.watch(outputs, microbatch)
        loss, metrics = self.loss_fn(outputs, microbatch)
        return (loss, metrics) if self.change is None else self.change(loss, metrics, microbatch)
