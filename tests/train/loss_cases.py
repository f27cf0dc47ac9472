"""Every loss under every aggregation, with a batch that has all it needs, in float64.

Rows are uneven; two of them are one trajectory and one has no trained token. Preferences are four
pairs of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict

from tandem.algorithms import AGGREGATION_MODES, POLICY_LOSSES, loss_weights
from tandem.algorithms.distillation import DIVERGENCES
from tandem.algorithms.objective import PolicyObjective
from tandem.algorithms.preference_objective import (
    PAIR_LOSSES,
    KTOObjective,
    PairObjective,
    RewardObjective,
)
from tandem.algorithms.sft import sft_loss
from tandem.algorithms.value import ValueObjective
from tandem.data.batch import WEIGHT_KEYS
from tests.train.conftest import VOCABULARY, make_batch

LENGTHS = [3, 9, 5, 7, 12, 2]
PAIR_LENGTHS = [4, 9, 6, 3, 11, 5, 7, 8]


@dataclass(frozen=True)
class LossCase:
    """``engine`` is ``policy``, ``value`` or ``reward``; rows of ``unit`` stay on one rank."""

    name: str
    engine: str
    loss_fn: Any
    batch: TensorDict
    unit: int = 1

    def share(self, rank: int, world: int) -> TensorDict:
        """The rows of one data-parallel rank."""
        units = torch.arange(len(self.batch)) // self.unit
        return self.batch[units % world == rank]


def _random(*size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(*size, generator=generator, dtype=torch.float64)


def token_batch(mode: str) -> TensorDict:
    batch = make_batch(LENGTHS)
    generator = torch.Generator().manual_seed(1)
    shape = tuple(batch["input_ids"].shape)

    def random(*size: int) -> torch.Tensor:
        return _random(*size, generator=generator)

    batch["loss_mask"][5] = False
    sample_ids = torch.tensor([0, 0, 1, 2, 3, 4])
    weights = loss_weights(
        mode, batch["loss_mask"], sample_ids=sample_ids, horizon=9, dtype=torch.float64
    )
    for key in WEIGHT_KEYS:
        batch[key] = weights
    for key in ("prox_logprobs", "ref_logprobs", "logprobs", "values", "returns"):
        batch[key] = -5 * random(*shape)
    batch["advantages"] = (2 * random(shape[0], 1) - 1).expand(shape).clone()
    batch["behaviour_weights"] = random(*shape)
    batch["cov_selected"] = random(*shape) < 0.3
    batch["temperature"] = random(shape[0]) + 0.5
    batch["candidate_ids"] = torch.randint(VOCABULARY, (*shape, 4), generator=generator)
    batch["candidate_teacher_logprobs"] = random(*shape, 5).log_softmax(-1)[..., :4]
    batch["versions"] = torch.randint(0, 4, shape, generator=generator)
    batch["prox_version"] = torch.full((shape[0],), 3)
    return batch


def pair_batch() -> TensorDict:
    batch = make_batch(PAIR_LENGTHS)
    generator = torch.Generator().manual_seed(2)
    size = len(PAIR_LENGTHS)
    batch["loss_weights"] = torch.full((size,), 2 / size, dtype=torch.float64)
    batch["pair_ids"] = torch.arange(size) // 2
    batch["is_chosen"] = torch.arange(size) % 2 == 0
    batch["ref_logprob_sums"] = -20 * _random(size, generator=generator)
    batch["kl_baselines"] = torch.full((size,), 0.5, dtype=torch.float64)
    batch["margins"] = _random(size, generator=generator)
    return batch


def loss_cases() -> Iterator[LossCase]:
    for mode in AGGREGATION_MODES:
        batch = token_batch(mode)
        for name in POLICY_LOSSES:
            objective = PolicyObjective(policy_loss=name, kl_coef=0.1, entropy_coef=0.01)
            yield LossCase(f"{name} {mode}", "policy", objective, batch)
        for estimator in ("k1", "k2", "abs"):
            objective = PolicyObjective(kl_coef=0.5, kl_estimator=estimator)
            yield LossCase(f"{estimator} {mode}", "policy", objective, batch)
        for divergence in DIVERGENCES:
            objective = PolicyObjective(distill_coef=0.5, divergence=divergence)
            yield LossCase(f"{divergence} {mode}", "policy", objective, batch)
        objective = PolicyObjective(interpolates=True, correction="decoupled_cap")
        yield LossCase(f"interpolated {mode}", "policy", objective, batch)
        yield LossCase(f"sft {mode}", "policy", sft_loss, batch)
        yield LossCase(f"value {mode}", "value", ValueObjective(clip=0.2), batch)
    pairs = pair_batch()
    for name in PAIR_LOSSES:
        smoothing = 0.1 if name == "robust" else 0.0
        objective = PairObjective(name, sft_coef=0.2, label_smoothing=smoothing)
        yield LossCase(f"pairs {name}", "policy", objective, pairs, unit=2)
    smoothed = PairObjective("sigmoid", label_smoothing=0.1, length_normalised=True)
    yield LossCase("pairs smoothed", "policy", smoothed, pairs, unit=2)
    yield LossCase("kto", "policy", KTOObjective(undesirable_weight=1.5), pairs)
    yield LossCase("reward", "reward", RewardObjective(center_coef=0.1), pairs, unit=2)
