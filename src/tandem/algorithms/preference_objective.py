"""Losses of a micro-batch of preferences, as a train engine calls them.

What belongs here: which rows form a pair, sums over a response's tokens, metrics. The formulas are
in ``preference``. What needs the whole step (``kl_baselines``, the weights) or another model
(``ref_logprob_sums``) is in the batch already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from tandem.algorithms.objective import required_key
from tandem.algorithms.preference import (
    PREFERENCE_LOSSES,
    bradley_terry,
    kto_loss,
    orpo_loss,
    preference_loss,
    preference_margin,
    simpo_loss,
)
from tandem.algorithms.tokens import under_mask
from tandem.errors import ConfigError, DataError
from tandem.types import Metric

if TYPE_CHECKING:
    from tensordict import TensorDict

REFERENCE_FREE = ("simpo", "orpo")
PAIR_LOSSES = (*PREFERENCE_LOSSES, *REFERENCE_FREE)


@dataclass(frozen=True, slots=True)
class PairObjective:
    """``sum(w * loss)`` over pairs, ``w`` the ``loss_weights [B]`` of each pair's chosen row.

    ``loss`` is one of ``PAIR_LOSSES``. ``length_normalised`` divides each response's log-ratio by
    its tokens (None: only for ``ipo``); ``simpo`` and ``orpo`` always do. ``gamma`` is SimPO's
    margin. ``sft_coef`` adds that multiple of the chosen response's mean negative log-probability
    a token (RPO, arXiv 2404.19733, eq. 1).

    The batch has ``loss_mask``, ``pair_ids``, ``is_chosen`` and, unless ``loss`` is free of a
    reference, ``ref_logprob_sums [B]``.
    """

    loss: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    length_normalised: bool | None = None
    gamma: float = 0.5
    sft_coef: float = 0.0

    keep_together: ClassVar[str] = "pair_ids"

    def __post_init__(self) -> None:
        if self.loss not in PAIR_LOSSES:
            raise ConfigError(f"loss: got {self.loss!r}, allowed: {', '.join(PAIR_LOSSES)}")
        if self.loss in REFERENCE_FREE:
            if self.length_normalised is False or self.label_smoothing:
                raise ConfigError(
                    f"loss {self.loss}: length_normalised and label_smoothing cannot be changed; "
                    "it averages over tokens and takes labels as they are"
                )
            simpo_loss(torch.zeros(1), torch.zeros(1), beta=self.beta)
            return
        # A wrong combination of options is an error now, not in the first step.
        preference_loss(
            torch.zeros(1), self.loss, beta=self.beta, label_smoothing=self.label_smoothing
        )

    @property
    def needs_reference(self) -> bool:
        return self.loss not in REFERENCE_FREE

    def __call__(
        self, outputs: Mapping[str, Tensor], microbatch: TensorDict
    ) -> tuple[Tensor, dict[str, Metric]]:
        chosen, rejected = pair_rows(microbatch)
        sums_B, lengths_B = response_sums(outputs["train_logprobs"], microbatch["loss_mask"])
        means_B = sums_B / lengths_B
        margin = self._margin(sums_B, lengths_B, microbatch, chosen, rejected)
        if self.loss == "simpo":
            losses = simpo_loss(
                means_B[chosen], means_B[rejected], beta=self.beta, gamma=self.gamma
            )
        elif self.loss == "orpo":
            losses = orpo_loss(means_B[chosen], means_B[rejected], beta=self.beta)
        else:
            losses = preference_loss(
                margin, self.loss, beta=self.beta, label_smoothing=self.label_smoothing
            )
        if self.sft_coef:
            losses = losses - self.sft_coef * means_B[chosen]
        loss = (microbatch["loss_weights"][chosen] * losses).sum()
        shown_B = means_B if self._is_normalised else sums_B
        return loss, {
            **_pair_metrics("preference", margin.detach(), self.beta),
            **_logprob_metrics("preference", shown_B.detach(), chosen, rejected),
        }

    @property
    def _is_normalised(self) -> bool:
        if self.length_normalised is not None:
            return self.length_normalised
        return self.loss in ("ipo", *REFERENCE_FREE)

    def _margin(
        self,
        sums_B: Tensor,
        lengths_B: Tensor,
        microbatch: TensorDict,
        chosen: Tensor,
        rejected: Tensor,
    ) -> Tensor:
        if self.needs_reference:
            reference_B = required_key(microbatch, "ref_logprob_sums")
        else:
            reference_B = torch.zeros_like(sums_B)
        lengths = {}
        if self._is_normalised:
            lengths = {"len_chosen": lengths_B[chosen], "len_rejected": lengths_B[rejected]}
        return preference_margin(
            sums_B[chosen], sums_B[rejected], reference_B[chosen], reference_B[rejected], **lengths
        )


@dataclass(frozen=True, slots=True)
class KTOObjective:
    """``sum(loss_weights [B] * kto_loss)`` over single responses; ``is_chosen``: desirable.

    The batch has ``loss_mask``, ``is_chosen``, ``ref_logprob_sums`` and ``kl_baselines``, which is
    one number for all rows of a step.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    needs_reference: ClassVar[bool] = True

    def __call__(
        self, outputs: Mapping[str, Tensor], microbatch: TensorDict
    ) -> tuple[Tensor, dict[str, Metric]]:
        sums_B, _ = response_sums(outputs["train_logprobs"], microbatch["loss_mask"])
        ratio_B = sums_B - required_key(microbatch, "ref_logprob_sums").detach()
        is_desirable = required_key(microbatch, "is_chosen").bool()
        baseline_B = required_key(microbatch, "kl_baselines")
        losses = kto_loss(
            ratio_B,
            is_desirable,
            baseline_B,
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )
        loss = (microbatch["loss_weights"] * losses).sum()
        reward_B = self.beta * ratio_B.detach()
        is_right = (ratio_B.detach() > baseline_B) == is_desirable
        return loss, {
            "preference/accuracy": _mean(is_right),
            "preference/desirable_reward": _mean(reward_B[is_desirable]),
            "preference/undesirable_reward": _mean(reward_B[~is_desirable]),
            "preference/kl_baseline": _mean(baseline_B),
        }


@dataclass(frozen=True, slots=True)
class RewardObjective:
    """``sum(w * (bradley_terry + center_coef * (r_chosen + r_rejected)^2))`` over pairs.

    ``w`` is ``loss_weights [B]`` of the chosen row; ``margins [B]``, where the batch has them, are
    those of ``bradley_terry``. The second term keeps scores around 0 (arXiv 2312.09244, eq. 2).
    """

    center_coef: float = 0.0

    keep_together: ClassVar[str] = "pair_ids"
    required_outputs: ClassVar[frozenset[str]] = frozenset({"scores"})

    def __call__(
        self, outputs: Mapping[str, Tensor], microbatch: TensorDict
    ) -> tuple[Tensor, dict[str, Metric]]:
        rows_chosen, rows_rejected = pair_rows(microbatch)
        chosen, rejected = outputs["scores"][rows_chosen], outputs["scores"][rows_rejected]
        margins = microbatch.get("margins", None)
        losses = bradley_terry(chosen, rejected, None if margins is None else margins[rows_chosen])
        if self.center_coef:
            losses = losses + self.center_coef * (chosen + rejected) ** 2
        loss = (microbatch["loss_weights"][rows_chosen] * losses).sum()
        return loss, {
            **_pair_metrics("reward_model", (chosen - rejected).detach(), 1.0),
            "reward_model/score_mean": _mean(outputs["scores"].detach()),
        }


def pair_rows(microbatch: TensorDict) -> tuple[Tensor, Tensor]:
    """Row numbers of the chosen and of the rejected response of every pair, in one order.

    Raises:
        DataError: a pair is not one chosen and one rejected row.
    """
    ids, is_chosen = (
        required_key(microbatch, "pair_ids"),
        required_key(microbatch, "is_chosen").bool(),
    )
    chosen, rejected = is_chosen.nonzero().squeeze(-1), (~is_chosen).nonzero().squeeze(-1)
    chosen, rejected = chosen[ids[chosen].argsort()], rejected[ids[rejected].argsort()]
    is_paired = torch.equal(ids[chosen], ids[rejected])
    if not is_paired or len(ids[chosen].unique()) != len(chosen):
        raise DataError(
            "pair_ids: expected one chosen and one rejected row of every pair, received "
            f"pair_ids {ids.tolist()} with is_chosen {is_chosen.tolist()}"
        )
    return chosen, rejected


def response_sums(logprobs_BT: Tensor, loss_mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the log-probabilities of each row's response, and its number of tokens.

    Raises:
        DataError: a row without a response.
    """
    mask = loss_mask_BT.bool()
    lengths_B = mask.sum(1)
    if bool((lengths_B < 1).any()):
        row = int((lengths_B < 1).nonzero()[0])
        raise DataError(f"loss_mask: row {row} has no response token; drop it")
    return under_mask(logprobs_BT, mask).sum(1), lengths_B


def _pair_metrics(prefix: str, margin: Tensor, scale: float) -> dict[str, Metric]:
    return {
        f"{prefix}/accuracy": _mean(margin > 0),
        f"{prefix}/margin": _mean(scale * margin),
    }


def _logprob_metrics(
    prefix: str, logprobs_B: Tensor, chosen: Tensor, rejected: Tensor
) -> dict[str, Metric]:
    """Without the reference: which response the policy finds the more likely one."""
    return {
        f"{prefix}/policy_accuracy": _mean(logprobs_B[chosen] > logprobs_B[rejected]),
        f"{prefix}/logprob_chosen": _mean(logprobs_B[chosen]),
        f"{prefix}/logprob_rejected": _mean(logprobs_B[rejected]),
    }


def _mean(values: Tensor) -> Metric:
    return Metric(values.float().mean() if len(values) else 0.0, float(len(values)))
