"""The loss of an RL step: policy term, KL to a reference, entropy bonus, a teacher's term.

What belongs here: how the terms are put together from a micro-batch's keys, and their metrics.
What does not: the formulas of the terms, and anything that needs the whole step (loss weights,
behaviour correction, advantages), which is in the batch already.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tandem.algorithms.correction import CORRECTIONS, prox_loglinear
from tandem.algorithms.distillation import DIVERGENCES, topk_divergence
from tandem.algorithms.kl import KL_ESTIMATORS, KLGradient, kl_estimate
from tandem.algorithms.policy import POLICY_BATCH_KEYS, POLICY_LOSSES
from tandem.algorithms.tokens import under_mask
from tandem.errors import ConfigError, DataError
from tandem.types import LossFn, Metric

if TYPE_CHECKING:
    from tensordict import TensorDict


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """``sum(w * policy) + kl_coef * sum(w_kl * KL) - entropy_coef * sum(w_entropy * entropy)``,
    ``+ distill_coef * sum(w_distill * divergence from the teacher)``.

    The ratio is taken against ``prox_logprobs``; with ``single_step``, for a training batch that is
    one optimizer step, against the policy's own value in the same pass, which is what they would
    be. ``w`` is ``loss_weights``, times
    ``behaviour_weights`` when the batch has them; ``w_kl``, ``w_entropy`` and ``w_distill`` are
    ``kl_loss_weights``, ``entropy_loss_weights`` and ``distill_loss_weights``. ``policy_kwargs`` go
    to the policy loss. The teacher's term compares the tokens ``candidate_ids``, of which the
    teacher's own are ``candidate_teacher_logprobs`` (both ``[B, T, K]``).

    With ``interpolates`` the log-probabilities that the ratio starts from are ``prox_loglinear`` of
    the policy's own in the same pass, from ``logprobs``, ``versions`` and ``prox_version [B]``, the
    version that the batch is trained from; ``correction`` then weighs tokens against them, by a
    method of ``CORRECTIONS`` that looks at each token alone.
    """

    policy_loss: str = "ppo_clip"
    policy_kwargs: Mapping[str, Any] = field(default_factory=dict)
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_gradient: KLGradient = "auto"
    entropy_coef: float = 0.0
    measures_entropy: bool = False
    distill_coef: float = 0.0
    divergence: str = "reverse"
    single_step: bool = False
    interpolates: bool = False
    correction: str | None = None
    correction_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_choice("policy_loss", self.policy_loss, POLICY_LOSSES)
        _check_choice("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        _check_choice("divergence", self.divergence, DIVERGENCES)
        known = set(inspect.signature(POLICY_LOSSES[self.policy_loss]).parameters)
        unknown = sorted(set(self.policy_kwargs) - known)
        if unknown:
            raise ConfigError(
                f"policy_kwargs: {self.policy_loss} does not take {unknown[0]!r}, "
                f"allowed: {', '.join(sorted(known - set(_POSITIONAL)))}"
            )

    @property
    def required_outputs(self) -> frozenset[str]:
        has_entropy = self.entropy_coef or self.measures_entropy
        wanted = {"entropy": has_entropy, "candidate_logprobs": self.distill_coef}
        return frozenset({"train_logprobs", *(name for name, coef in wanted.items() if coef)})

    def __call__(
        self, outputs: Mapping[str, Tensor], microbatch: TensorDict
    ) -> tuple[Tensor, dict[str, Metric]]:
        mask = required_key(microbatch, "loss_mask").bool()
        logprobs = outputs["train_logprobs"]
        prox_BT = self._prox(logprobs, microbatch)
        policy_BT, stats = POLICY_LOSSES[self.policy_loss](
            logprobs,
            prox_BT,
            required_key(microbatch, "advantages"),
            mask,
            **{k: required_key(microbatch, k) for k in POLICY_BATCH_KEYS.get(self.policy_loss, ())},
            **self.policy_kwargs,
        )
        averages = {f"actor/{name}": value for name, value in stats.items()}
        weights = required_key(microbatch, "loss_weights")
        if self.correction is not None:
            behaviour_BT, kept_BT = CORRECTIONS[self.correction](
                prox_BT, required_key(microbatch, "logprobs"), mask, **self.correction_kwargs
            )
            weights = weights * behaviour_BT
            averages["behaviour/weight_mean"] = behaviour_BT
            averages["behaviour/dropped_fraction"] = (mask & ~kept_BT).to(logprobs.dtype)
        elif "behaviour_weights" in microbatch:
            weights = weights * under_mask(microbatch["behaviour_weights"], mask)
        loss = policy_loss = (weights * policy_BT).sum()
        if self.kl_coef:
            kl_BT = self._kl(logprobs, microbatch, mask)
            loss = loss + self.kl_coef * (required_key(microbatch, "kl_loss_weights") * kl_BT).sum()
            averages["actor/kl_loss"] = kl_BT
        if self.distill_coef:
            gap_BT = self._teacher_divergence(outputs, microbatch, mask)
            weights_BT = required_key(microbatch, "distill_loss_weights")
            loss = loss + self.distill_coef * (weights_BT * gap_BT).sum()
            averages["actor/distill_loss"] = gap_BT
        if "entropy" in outputs:
            entropy_BT = under_mask(outputs["entropy"], mask)
            averages["actor/entropy"] = entropy_BT
            if self.entropy_coef:
                bonus = (required_key(microbatch, "entropy_loss_weights") * entropy_BT).sum()
                loss = loss - self.entropy_coef * bonus
        metrics = _token_means(averages, mask)
        metrics["actor/pg_loss"] = Metric(policy_loss.detach(), 1.0, "sum")
        return loss, metrics

    def _prox(self, logprobs: Tensor, microbatch: TensorDict) -> Tensor:
        """What the ratio is taken against; no gradient flows into it."""
        if self.interpolates:
            version_B1 = required_key(microbatch, "prox_version")[:, None]
            return prox_loglinear(
                logprobs,
                required_key(microbatch, "logprobs"),
                sampler_versions=required_key(microbatch, "versions"),
                prox_version=version_B1,
                current_version=version_B1 + 1,
            )
        return logprobs.detach() if self.single_step else required_key(microbatch, "prox_logprobs")

    def _kl(self, logprobs: Tensor, microbatch: TensorDict, mask: Tensor) -> Tensor:
        kl = kl_estimate(
            under_mask(logprobs, mask),
            under_mask(required_key(microbatch, "ref_logprobs"), mask),
            self.kl_estimator,
            gradient=self.kl_gradient,
        )
        return under_mask(kl, mask)

    def _teacher_divergence(
        self, outputs: Mapping[str, Tensor], microbatch: TensorDict, mask: Tensor
    ) -> Tensor:
        teacher_BTK = required_key(microbatch, "candidate_teacher_logprobs")
        return topk_divergence(
            outputs["candidate_logprobs"], teacher_BTK, mask, divergence=self.divergence
        )


class Recorder:
    """The objective; the log-probabilities that it sees become ``prox_logprobs`` of the batch."""

    def __init__(self, objective: LossFn, batch: TensorDict) -> None:
        self.objective = objective
        self._prox_BT = torch.zeros_like(batch["logprobs"])
        batch["prox_logprobs"] = self._prox_BT
        batch["rows"] = torch.arange(len(batch))
        self.required_outputs = getattr(objective, "required_outputs", {"train_logprobs"})

    def __call__(
        self, outputs: Mapping[str, Tensor], microbatch: TensorDict
    ) -> tuple[Tensor, dict[str, Metric]]:
        self.record(microbatch["rows"], outputs["train_logprobs"])
        return self.objective(outputs, microbatch)

    def record(self, rows: Tensor, logprobs_BT: Tensor) -> None:
        """Log-probabilities of these rows of the batch."""
        seen_BT = logprobs_BT.detach().to(self._prox_BT)
        self._prox_BT.index_copy_(0, rows.to(seen_BT.device), seen_BT)


_POSITIONAL = ("logprobs_BT", "old_logprobs_BT", "advantages_BT", "mask_BT")


def _check_choice(name: str, value: str, table: Mapping[str, object]) -> None:
    if value not in table:
        raise ConfigError(f"{name}: got {value!r}, allowed: {', '.join(table)}")


def required_key(microbatch: TensorDict, key: str) -> Tensor:
    """A key of the batch that the loss cannot do without."""
    value = microbatch.get(key, None)
    if value is None:
        found = ", ".join(sorted(map(str, microbatch.keys())))
        raise DataError(f"{key}: missing from the batch, required by the loss; found: {found}")
    return value


def _token_means(values: Mapping[str, Tensor], mask: Tensor) -> dict[str, Metric]:
    """Means over the trained tokens, weighted by their number."""
    count = mask.sum(dtype=torch.float32)
    return {
        name: Metric(under_mask(value.detach().float(), mask).sum() / count.clamp(min=1), count)
        for name, value in values.items()
    }
