"""From the rows of a rollout to optimizer steps: what is computed once per training batch.

    rows -> prox (and reference) log-probabilities -> final masks -> advantages
         -> mini-batches of whole episodes -> one set of loss weights for each optimizer step

A training batch that is one optimizer step needs no pass of its own for the prox log-probabilities:
they are those of the training pass, where ``Recorder`` takes them. Losses and estimators live in
``algorithms/``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from tensordict import TensorDict

from tandem.algorithms.advantages import assign_advantages
from tandem.algorithms.aggregation import loss_weights
from tandem.algorithms.correction import behaviour_correction
from tandem.algorithms.mismatch import mismatch_metrics
from tandem.algorithms.objective import PolicyObjective
from tandem.algorithms.policy.covariance import (
    clip_cov_candidates,
    select_clip_cov,
    select_kl_cov,
    token_covariance,
)
from tandem.config import AlgorithmConfig
from tandem.observe import mean_metrics
from tandem.train import TrainEngine
from tandem.types import LossFn, Metric

Metrics = dict[str, float]


def build_objective(config: AlgorithmConfig) -> PolicyObjective:
    return PolicyObjective(
        policy_loss=config.policy_loss,
        policy_kwargs=_clipping(config),
        kl_coef=config.kl_coef,
        kl_estimator=config.kl_estimator,
        entropy_coef=config.entropy_coef,
        single_step=is_single_step(config),
    )


def _clipping(config: AlgorithmConfig) -> dict[str, float]:
    """The clip bounds that the configuration sets; a loss that has none refuses them."""
    bounds = {name: getattr(config, name) for name in ("clip_low", "clip_high", "dual_clip")}
    return {name: value for name, value in bounds.items() if value is not None}


def is_single_step(config: AlgorithmConfig) -> bool:
    """Whether nothing needs the policy's log-probabilities before the (only) optimizer step."""
    needs_them_before = config.decoupled or config.policy_loss in ("clip_cov", "kl_cov")
    return config.epochs * config.minibatches == 1 and not needs_them_before


class Recorder:
    """The objective; the log-probabilities that it sees become ``prox_logprobs`` of the batch."""

    def __init__(self, objective: PolicyObjective, batch: TensorDict) -> None:
        self._objective = objective
        self._prox_BT = torch.zeros_like(batch["logprobs"])
        batch["prox_logprobs"] = self._prox_BT
        batch["rows"] = torch.arange(len(batch))
        self.required_outputs = objective.required_outputs

    def __call__(
        self, outputs: Mapping[str, torch.Tensor], microbatch: TensorDict
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        seen = outputs["train_logprobs"].detach().to(self._prox_BT)
        self._prox_BT.index_copy_(0, microbatch["rows"].to(seen.device), seen)
        return self._objective(outputs, microbatch)


def learn(
    batch: TensorDict,
    engine: TrainEngine,
    config: AlgorithmConfig,
    objective: PolicyObjective,
    *,
    reference: TrainEngine | None,
    lap: Callable[[str], None],
    beat: Callable[[], None],
) -> Metrics:
    """Train on one batch; the metrics are a function of the batch and the state of the engine.

    ``lap`` is called with the name of each part that is done, ``beat`` after every optimizer step.
    """
    batch, metrics = prepare_batch(batch, engine, config, reference=reference)
    lap("prepare")
    loss_fn: LossFn = objective
    if objective.single_step:
        loss_fn = Recorder(objective, batch)
    steps = []
    for minibatch in minibatches(batch, config):
        steps.append(engine.train_batch(select_tokens(minibatch, engine, config), loss_fn))
        engine.lr_scheduler_step()
        beat()
    metrics |= mismatch(batch, engine.get_version())
    means = mean_metrics(steps)
    metrics |= {n if "/" in n else f"actor/{n}": value for n, value in means.items()}
    lap("train")
    return metrics


def prepare_batch(
    batch: TensorDict,
    engine: TrainEngine,
    config: AlgorithmConfig,
    *,
    reference: TrainEngine | None,
) -> tuple[TensorDict, Metrics]:
    """Everything that needs the whole training batch, before its first optimizer step."""
    batch = batch.copy()
    if not is_single_step(config):
        batch["prox_logprobs"] = score(batch, engine)
    metrics = rollout_metrics(batch)
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
