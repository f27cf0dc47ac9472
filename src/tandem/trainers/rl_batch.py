"""The policy's optimizer steps of one training batch: objective, mini-batches, loss weights.

    advantages -> mini-batches of whole episodes -> one set of loss weights for each optimizer step

A training batch that is one optimizer step needs no pass of its own for the prox log-probabilities:
they are those of the training pass, where ``Recorder`` takes them. The order of everything before
is in ``rl_learner``; losses and estimators live in ``algorithms/``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tensordict import TensorDict

from tandem.algorithms.aggregation import loss_weights
from tandem.algorithms.mismatch import mismatch_metrics
from tandem.algorithms.objective import PolicyObjective
from tandem.algorithms.policy.covariance import (
    clip_cov_candidates,
    select_clip_cov,
    select_kl_cov,
    token_covariance,
)
from tandem.algorithms.shaping import trajectory_sums
from tandem.config import AlgorithmConfig, TeacherConfig
from tandem.config.algorithm import TEACHER_ADVANTAGES
from tandem.train import TrainEngine

Metrics = dict[str, float]


def build_objective(
    config: AlgorithmConfig, teacher: TeacherConfig | None = None
) -> PolicyObjective:
    has_teacher_term = teacher is not None and teacher.top_k is not None
    in_pass = config.corrections[0] if config.prox == "loglinear" and config.corrections else None
    return PolicyObjective(
        policy_loss=config.policy_loss,
        policy_kwargs={**config.policy_kwargs, **_clipping(config)},
        kl_coef=0.0 if config.kl_in_reward else config.kl_coef,
        kl_estimator=kl_estimator(config),
        entropy_coef=config.entropy_coef,
        measures_entropy=config.log_entropy,
        distill_coef=teacher.coef if teacher and has_teacher_term else 0.0,
        divergence=teacher.divergence if teacher else "reverse",
        single_step=is_single_step(config),
        interpolates=config.prox == "loglinear",
        correction=in_pass.method if in_pass else None,
        correction_kwargs=in_pass.kwargs if in_pass else {},
    )


def kl_estimator(config: AlgorithmConfig) -> str:
    """Of the divergence from the reference: k3 as a loss, k1 in the reward, unless configured."""
    return config.kl_estimator or ("k1" if config.kl_in_reward else "k3")


def _clipping(config: AlgorithmConfig) -> dict[str, float]:
    """The clip bounds that the configuration sets; a loss that has none refuses them."""
    bounds = {name: getattr(config, name) for name in ("clip_low", "clip_high", "dual_clip")}
    return {name: value for name, value in bounds.items() if value is not None}


def is_single_step(config: AlgorithmConfig) -> bool:
    """Whether nothing needs the policy's log-probabilities before the (only) optimizer step, and
    they are what the ratio starts from."""
    needs_them_before = (
        bool(config.corrections)
        or config.prox == "loglinear"
        or config.kl_in_reward
        or config.policy_loss in ("clip_cov", "kl_cov")
        or config.advantage in TEACHER_ADVANTAGES
    )
    return config.epochs * config.minibatches == 1 and not needs_them_before


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


def split_episodes(batch: TensorDict, epochs: int, num_parts: int) -> Iterator[TensorDict]:
    """``epochs`` times all rows in ``num_parts`` parts of whole episodes, in order."""
    episodes = torch.unique_consecutive(batch["episode_ids"])
    for _ in range(epochs):
        for part in episodes.chunk(num_parts):
            yield batch[torch.isin(batch["episode_ids"], part)]


def minibatches(batch: TensorDict, config: AlgorithmConfig) -> Iterator[TensorDict]:
    """Optimizer steps of one training batch, each with its own weights of every term."""
    terms = {
        "loss_weights": True,
        "kl_loss_weights": config.kl_coef > 0 and not config.kl_in_reward,
        "entropy_loss_weights": config.entropy_coef > 0,
        "distill_loss_weights": "candidate_ids" in batch,
    }
    for minibatch in split_episodes(batch, config.epochs, config.minibatches):
        weights = loss_weights(
            config.aggregation,
            minibatch["loss_mask"],
            sample_ids=minibatch["sample_ids"],
            horizon=config.horizon,
        )
        for name, is_used in terms.items():
            if is_used:
                minibatch[name] = weights
        yield minibatch


def select_tokens(
    minibatch: TensorDict, engine: TrainEngine, config: AlgorithmConfig
) -> TensorDict:
    """For Clip-Cov and KL-Cov: which tokens of this optimizer step are held back, by the present
    policy's log-probabilities. Other losses get the mini-batch as it is."""
    if config.policy_loss not in ("clip_cov", "kl_cov"):
        return minibatch
    mask_BT, advantages_BT = minibatch["loss_mask"], minibatch["advantages"]
    logprobs_BT = score(minibatch, engine)
    covariance_BT = token_covariance(logprobs_BT, advantages_BT, mask_BT)
    if config.policy_loss == "kl_cov":
        minibatch["cov_selected"] = select_kl_cov(covariance_BT, mask_BT)
        return minibatch
    candidates_BT = clip_cov_candidates(
        covariance_BT,
        logprobs_BT,
        minibatch["prox_logprobs"],
        advantages_BT,
        mask_BT,
        **_clipping(config),
    )
    minibatch["cov_selected"] = select_clip_cov(candidates_BT, mask_BT)
    return minibatch


def first_rows(sample_ids_B: torch.Tensor) -> torch.Tensor:
    """Row numbers of the first row of each trajectory."""
    unique, index_B = torch.unique(sample_ids_B, return_inverse=True)
    position_B = torch.arange(len(sample_ids_B), device=sample_ids_B.device)
    start = position_B.new_full((unique.numel(),), len(sample_ids_B))
    return start.scatter_reduce_(0, index_B, position_B, "amin").sort().values


def rollout_metrics(batch: TensorDict) -> Metrics:
    """What people watch first: rewards and lengths of the sampled trajectories, each once."""
    sample_ids_B, mask_BT = batch["sample_ids"], batch["loss_mask"]
    first_S = first_rows(sample_ids_B)
    rewards_S = batch["rewards"][first_S]
    rewards_S = rewards_S[~rewards_S.isnan()]
    length_S = trajectory_sums(mask_BT.double(), mask_BT, sample_ids_B)[first_S].float()
    truncated_S = trajectory_sums(
        batch["truncated"].double()[:, None], torch.ones_like(mask_BT[:, :1]), sample_ids_B
    )[first_S]
    metrics = {
        "response_length/mean": float(length_S.mean()),
        "response_length/max": float(length_S.max()),
        "response_length/empty_fraction": float((length_S == 0).float().mean()),
        "response_length/truncated_fraction": float((truncated_S > 0).float().mean()),
        "perf/num_tokens": float(batch["attention_mask"].sum()),
    }
    if len(rewards_S):
        metrics["reward/mean"] = float(rewards_S.mean())
        metrics["reward/std"] = float(rewards_S.std(correction=0))
    return metrics


def mismatch(batch: TensorDict, version: int) -> Metrics:
    """Sampler against trainer, on all trained tokens and on those made by ``version``."""
    everywhere = mismatch_metrics(batch["prox_logprobs"], batch["logprobs"], batch["loss_mask"])
    return everywhere | same_version_mismatch(batch, version)


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
