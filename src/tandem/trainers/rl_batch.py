"""From the rows of a rollout to optimizer steps: what is computed once per training batch.

    rows -> prox (and reference) log-probabilities -> mismatch metrics -> final masks -> advantages
         -> mini-batches of whole episodes -> one set of loss weights for each optimizer step

Losses and estimators themselves live in ``algorithms/``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tensordict import TensorDict

from tandem.algorithms.advantages import assign_advantages
from tandem.algorithms.aggregation import loss_weights
from tandem.algorithms.correction import behaviour_correction
from tandem.algorithms.mismatch import mismatch_metrics
from tandem.algorithms.objective import PolicyObjective
from tandem.config import AlgorithmConfig
from tandem.train import TrainEngine

Metrics = dict[str, float]


def build_objective(config: AlgorithmConfig) -> PolicyObjective:
    params: dict[str, float] = {}
    if config.policy_loss in ("ppo_clip", "dual_clip", "gspo", "cispo"):
        params = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    if config.dual_clip is not None:
        params["dual_clip"] = config.dual_clip
    return PolicyObjective(
        policy_loss=config.policy_loss,
        policy_kwargs=params,
        kl_coef=config.kl_coef,
        kl_estimator=config.kl_estimator,
        entropy_coef=config.entropy_coef,
    )


def prepare_batch(
    batch: TensorDict,
    engine: TrainEngine,
    config: AlgorithmConfig,
    *,
    reference: TrainEngine | None,
) -> tuple[TensorDict, Metrics]:
    """Everything that needs the whole training batch, before its first optimizer step."""
    batch = batch.copy()
    batch["prox_logprobs"] = score(batch, engine)
    metrics = rollout_metrics(batch)
    metrics |= mismatch_metrics(batch["prox_logprobs"], batch["logprobs"], batch["loss_mask"])
    metrics |= same_version_mismatch(batch, engine.get_version())
    if config.kl_coef > 0:
        batch["ref_logprobs"] = reference_logprobs(batch, engine, reference)
    if config.mask_truncated:
        batch["loss_mask"] = batch["loss_mask"] & ~batch["truncated"].unsqueeze(-1)
    batch, advantage_metrics = assign_advantages(batch, config.advantage, **config.advantage_kwargs)
    metrics |= advantage_metrics
    if config.decoupled:
        batch, correction_metrics = behaviour_correction(batch, cap=config.behaviour_cap)
        metrics |= correction_metrics
    return batch, metrics


def score(batch: TensorDict, engine: TrainEngine) -> torch.Tensor:
    """The engine's log-probabilities ``[B, T]`` of the trained tokens at their temperature."""
    scored = engine.forward(batch, outputs=("train_logprobs",), trained_only=True)
    return scored["train_logprobs"]


def reference_logprobs(
    batch: TensorDict, engine: TrainEngine, reference: TrainEngine | None
) -> torch.Tensor:
    """Log-probabilities of the policy that training started from."""
    if reference is not None:
        return score(batch, reference)
    with engine.reference():
        return score(batch, engine)


def minibatches(batch: TensorDict, config: AlgorithmConfig) -> Iterator[TensorDict]:
    """Optimizer steps of one training batch: whole episodes, each with its own loss weights."""
    episodes = torch.unique_consecutive(batch["episode_ids"])
    for _ in range(config.epochs):
        for part in episodes.chunk(config.minibatches):
            rows = torch.isin(batch["episode_ids"], part)
            minibatch = batch[rows]
            weights = loss_weights(
                config.aggregation,
                minibatch["loss_mask"],
                sample_ids=minibatch["sample_ids"],
                horizon=config.horizon,
            )
            minibatch["loss_weights"] = weights
            if config.kl_coef > 0:
                minibatch["kl_loss_weights"] = weights
            if config.entropy_coef > 0:
                minibatch["entropy_loss_weights"] = weights
            yield minibatch


def rollout_metrics(batch: TensorDict) -> Metrics:
    """What people watch first: rewards and lengths of the sampled rows."""
    rewards_B = batch["rewards"]
    rewards_B = rewards_B[~rewards_B.isnan()]
    length_B = batch["loss_mask"].sum(-1).float()
    metrics = {
        "response_length/mean": float(length_B.mean()),
        "response_length/max": float(length_B.max()),
        "response_length/empty_fraction": float((length_B == 0).float().mean()),
        "response_length/truncated_fraction": float(batch["truncated"].float().mean()),
        "perf/num_tokens": float(batch["attention_mask"].sum()),
    }
    if len(rewards_B):
        metrics["reward/mean"] = float(rewards_B.mean())
        metrics["reward/std"] = float(rewards_B.std(correction=0))
    return metrics


def same_version_mismatch(batch: TensorDict, version: int) -> Metrics:
    """Sampler against trainer on the tokens that the present weights made; absent without any."""
    mask_BT = batch["loss_mask"] & (batch["versions"] == version)
    if not mask_BT.any():
        return {}
    gap_N = (batch["prox_logprobs"] - batch["logprobs"])[mask_BT].abs()
    return {
        "mismatch/same_version_max": float(gap_N.max()),
        "mismatch/same_version_over_1e-5": float((gap_N > 1e-5).float().mean()),
    }
