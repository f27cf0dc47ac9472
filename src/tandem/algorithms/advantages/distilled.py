"""Advantages that need no reward: a teacher's view of the sampled tokens, or nothing at all."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tandem.algorithms.advantages.groups import group_rewards
from tandem.algorithms.distillation import forward_kl_advantage, reverse_kl_advantage
from tandem.errors import DataError


def teacher_reverse_kl(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``distillation.reverse_kl_advantage`` of ``teacher_logprobs`` and ``prox_logprobs``."""
    return {"advantages": reverse_kl_advantage(*_inputs(inputs, "teacher_reverse_kl"))}


def teacher_forward_kl(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``distillation.forward_kl_advantage`` of ``teacher_logprobs`` and ``prox_logprobs``."""
    return {"advantages": forward_kl_advantage(*_inputs(inputs, "teacher_forward_kl"))}


def none(rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """0 for all: the policy term is nothing, other terms of the loss do the work."""
    groups = group_rewards(rewards_B, group_ids_B)
    return groups.rewards_B.new_zeros(rewards_B.shape).to(rewards_B.dtype)


def _inputs(inputs: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor, Tensor]:
    for key in ("teacher_logprobs", "prox_logprobs"):
        if key not in inputs:
            raise DataError(f"{key}: missing from the batch, required by {name}")
    return inputs["teacher_logprobs"], inputs["prox_logprobs"], inputs["loss_mask"]
