"""From the rewards of a rollout to those that advantages are made of.

The scores of a reward model, penalties, samples that are left out, the divergence from the
reference as a part of the reward. Each function changes keys of the batch that it is given and
returns metrics; the formulas are in ``algorithms``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDict
from torch import Tensor

from tandem.algorithms.kl import kl_estimate
from tandem.algorithms.shaping import kl_shaped_rewards, overlong_penalty, trajectory_sums
from tandem.algorithms.tokens import under_mask
from tandem.config import AlgorithmConfig, ShapingConfig
from tandem.errors import DataError
from tandem.train import TrainEngine
from tandem.trainers.rl_batch import first_rows

Metrics = dict[str, float]


def add_scores(batch: TensorDict, engine: TrainEngine, weight: float) -> Metrics:
    """``rewards`` plus ``weight`` times the score of the trajectory's last row, by a reward model.

    A reward that is missing stays missing.
    """
    with engine.eval_mode():
        scores_B = engine.forward(batch, outputs=("scores",))["scores"]
    scores_B = scores_B[_last_rows(batch["sample_ids"])].to(batch["rewards"])
    rollout_B = batch["rewards"]
    batch["scores"], batch["rewards"] = scores_B, rollout_B + weight * scores_B
    metrics = {
        "reward/model_mean": float(scores_B.mean()),
        "reward/model_std": float(scores_B.std(correction=0)),
    }
    if not rollout_B.isnan().all():
        metrics["reward/rollout_mean"] = float(rollout_B.nanmean())
    return metrics


def _last_rows(sample_ids_B: Tensor) -> Tensor:
    """Row number of the last row of each row's trajectory."""
    unique, index_B = torch.unique(sample_ids_B, return_inverse=True)
    position = torch.arange(len(sample_ids_B), device=sample_ids_B.device)
    last = position.new_zeros(unique.numel()).scatter_reduce_(0, index_B, position, "amax")
    return last[index_B]


def part_metrics(batch: TensorDict, weights: Mapping[str, float], *, is_sum: bool) -> Metrics:
    """The mean of each part of the rewards over trajectories, by its label in ``weights``.

    With ``is_sum`` the parts have to be all that ``rewards`` are made of.

    Raises:
        DataError: they are not.
    """
    if "reward_parts" not in batch:
        if not is_sum:
            return {}
        raise DataError(
            "reward_parts: missing from the batch, required by gdpo; the workflow does not ask the "
            "reward function (its scored_by), or is one that brings no parts"
        )
    parts_BK, rewards_B = batch["reward_parts"], batch["rewards"]
    total_B = parts_BK.double() @ parts_BK.new_tensor(list(weights.values())).double()
    other_B = (total_B - rewards_B).abs() > 1e-4 * (1 + rewards_B.abs())
    if is_sum and bool(other_B.any()):
        raise DataError(
            f"rewards: got {float(rewards_B[other_B][0]):g} where the parts sum to "
            f"{float(total_B[other_B][0]):g}; gdpo sees the parts only, so nothing else may reward "
            "(workflow_kwargs.scored_by=reward)"
        )
    means_K = parts_BK[first_rows(batch["sample_ids"])].nanmean(dim=0)
    return {
        f"reward/part/{label}": float(mean)
        for label, mean in zip(weights, means_K, strict=True)
        if mean == mean
    }


def shape_rewards(batch: TensorDict, config: AlgorithmConfig, *, max_new_tokens: int) -> Metrics:
    """What ``algorithm.shaping`` and ``algorithm.mask_truncated`` say, on ``rewards`` and
    ``loss_mask``.

    A sample that is left out has reward NaN and nothing to train. Lengths are a trajectory's
    trained tokens.
    """
    shaping, mask_BT, rewards_B = config.shaping, batch["loss_mask"], batch["rewards"]
    lengths_B = trajectory_sums(mask_BT.double(), mask_BT, batch["sample_ids"])
    truncated_B = batch["truncated"]
    if shaping.truncated_reward is not None:
        worth = torch.full_like(rewards_B, shaping.truncated_reward)
        rewards_B = torch.where(truncated_B & ~rewards_B.isnan(), worth, rewards_B)
    if shaping.overlong_cache is not None:
        penalty_B = overlong_penalty(
            lengths_B,
            max_length=max_new_tokens,
            cache=shaping.overlong_cache,
            factor=shaping.overlong_factor,
        )
        rewards_B = rewards_B + penalty_B.to(rewards_B)
    metrics = {}
    if shaping != ShapingConfig():
        kept_B = _is_within(lengths_B, shaping)
        rewards_B = torch.where(kept_B, rewards_B, torch.nan)
        mask_BT = mask_BT & kept_B[:, None]
        metrics["reward/filtered_fraction"] = 1.0 - float(kept_B.float().mean())
        if not rewards_B.isnan().all():
            metrics["reward/shaped_mean"] = float(rewards_B.nanmean())
    if config.mask_truncated:
        mask_BT = mask_BT & ~truncated_B[:, None]
    batch["rewards"], batch["loss_mask"] = rewards_B, mask_BT
    return metrics


def _is_within(lengths_B: Tensor, shaping: ShapingConfig) -> Tensor:
    within_B = torch.ones_like(lengths_B, dtype=torch.bool)
    if shaping.min_tokens is not None:
        within_B &= lengths_B >= shaping.min_tokens
    if shaping.max_tokens is not None:
        within_B &= lengths_B <= shaping.max_tokens
    return within_B


def penalise_divergence(batch: TensorDict, coef: float, estimator: str) -> tuple[float, Metrics]:
    """Less ``coef`` times the divergence from the reference, a token at a time.

    Writes ``token_rewards`` for estimators of advantages that read them, and takes the trajectory's
    sum off ``rewards`` for the others. Returns the mean divergence of a trajectory.
    """
    mask_BT, rewards_B = batch["loss_mask"], batch["rewards"]
    prox_BT, ref_BT = batch["prox_logprobs"], batch["ref_logprobs"]
    kl_BT = kl_estimate(under_mask(prox_BT, mask_BT), under_mask(ref_BT, mask_BT), estimator)
    kl_B = trajectory_sums(kl_BT, mask_BT, batch["sample_ids"])
    batch["token_rewards"] = kl_shaped_rewards(
        rewards_B.nan_to_num(nan=0.0), prox_BT, ref_BT, mask_BT, beta=coef, estimator=estimator
    )
    batch["rewards"] = rewards_B - coef * kl_B
    trained_B = mask_BT.any(dim=1)
    mean = float(kl_B[trained_B].mean()) if bool(trained_B.any()) else 0.0
    return mean, {"reward/kl_penalty": coef * mean, "actor/ref_kl": mean}


def has_signal(rows: TensorDict, advantage: str) -> bool:
    """Whether the rewards of a group differ: else it has no gradient (DAPO, arXiv 2503.14476).

    ReMax compares with the greedy completion, GDPO each part of the rewards by itself.
    """
    rewards_B = rows["rewards"]
    is_scored_B = ~rewards_B.isnan()
    if not bool(is_scored_B.any()):
        return False
    if advantage == "remax" and "greedy_rewards" in rows:
        return bool((rewards_B != rows["greedy_rewards"])[is_scored_B].any())
    if advantage == "gdpo" and "reward_parts" in rows:
        parts_BK = rows["reward_parts"][is_scored_B]
        return bool((parts_BK.amax(dim=0) > parts_BK.amin(dim=0)).any())
    scored = rewards_B[is_scored_B]
    return bool(scored.max() > scored.min())
