"""Checks of advantage estimators and reward shaping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tandem.algorithms.advantages.gae import gae
from tandem.algorithms.advantages.gdpo import gdpo
from tandem.algorithms.advantages.grpo import StdScope, grpo
from tandem.algorithms.advantages.reinforce import remax
from tandem.algorithms.advantages.reinforce_plus_plus import (
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
)
from tandem.algorithms.advantages.reweighted import gpg, opo
from tandem.algorithms.kl import AdaptiveKL
from tandem.algorithms.shaping import kl_shaped_rewards, overlong_penalty, score_on_last_token
from tandem.algorithms.tokens import (
    masked_whiten,
)
from tandem.testing.numerics.case import Case, Results


def check_gae(case: Case) -> Results:
    mask, values = case.mask(), case.floats("values")
    options = {key: case.params[key] for key in ("gamma", "lam") if key in case.params}
    if "score" in case:
        rewards = score_on_last_token(case.floats("score"), mask)
    else:
        rewards = case.floats("rewards")
    bootstrap = torch.full_like(values[:, 0], case.param("bootstrap", 0.0))
    advantages, returns = gae(rewards, values, mask, bootstrap_values_B=bootstrap, **options)
    results: Results = {
        "advantages": advantages,
        "returns": returns,
        "returns_under_mask": returns,
        "compressed_advantages": [
            row[keep].tolist() for row, keep in zip(advantages, mask, strict=True)
        ],
        "terminal": advantages,
    }
    if "score" in case:
        results["reward_index"] = rewards.abs().argmax(dim=1)
    if "next_value" in case:
        following = case.floats("next_value")
        results["truncated"], _ = gae(
            rewards, values, mask, bootstrap_values_B=following, **options
        )
    return results


def check_gae_whitened(case: Case) -> Results:
    advantages = check_gae(case)["advantages"]
    options = {key: case.params[key] for key in ("ddof", "eps") if key in case.params}
    return {"advantages": masked_whiten(advantages, case.mask(), **options)}


def check_token_reward(case: Case) -> Results:
    rewards = kl_shaped_rewards(
        case.floats("score"),
        case.floats("logp"),
        case.floats("ref_logp"),
        case.mask(),
        beta=case.params["beta"],
        estimator=case.param("estimator", "k1"),
    )
    return {"token_rewards": rewards, "return_sum": rewards.sum(dim=1)}


def check_adaptive_kl(case: Case) -> Results:
    p = case.params
    controller = AdaptiveKL(p["init"], p["target"], p["horizon"])
    coefs = []
    for kl in case.inputs["kl"]:
        controller = controller.updated(kl, p["n_steps"])
        coefs.append(controller.coef)
    return {"beta": coefs}


def check_grpo(case: Case) -> Results:
    options = {key: case.params[key] for key in ("ddof", "eps") if key in case.params}
    scope: StdScope = (
        "batch" if "batch" in case.id else "group" if case.param("std", True) else "none"
    )
    return {"advantages": grpo(case.floats("scores"), case.groups(), std=scope, **options)}


def outcome(estimator: Callable[..., Tensor], *options: str) -> Callable[[Case], Results]:
    """A check of an estimator whose parameters have our names in the file."""

    def check(case: Case) -> Results:
        kwargs = {key: case.params[key] for key in options if key in case.params}
        return {"advantages": estimator(case.floats("scores"), case.groups(), **kwargs)}

    return check


def check_reinforce_plus_plus(case: Case) -> Results:
    options = {key: case.params[key] for key in ("gamma", "ddof", "eps") if key in case.params}
    advantages, returns = reinforce_plus_plus(case.floats("token_rewards"), case.mask(), **options)
    return {"advantages": advantages, "returns": returns}


def check_reinforce_plus_plus_baseline(case: Case) -> Results:
    options = {key: case.params[key] for key in ("ddof", "eps") if key in case.params}
    return {
        "advantages": reinforce_plus_plus_baseline(
            case.floats("scores"), case.groups(), case.mask(), **options
        )
    }


def check_remax(case: Case) -> Results:
    scores = case.floats("scores")
    advantages = remax(
        scores, torch.arange(len(scores)), greedy_rewards=case.floats("greedy_scores")
    )
    return {"advantages": advantages[:, None] * case.mask()}


def check_opo(case: Case) -> Results:
    scores = case.floats("scores")
    advantages = opo(scores, case.groups(), lengths=case.mask().sum(dim=1))
    baselines = (scores - advantages).tolist()
    named = zip(case.inputs["group"], baselines, strict=True)
    return {"advantages": advantages, "baseline": dict(named)}


def check_gpg(case: Case) -> Results:
    scores, groups = case.floats("scores"), case.groups()
    advantages = gpg(scores, groups, f_norm=case.param("f_norm", 1.0), live="rewards")
    centred = grpo(scores, groups, std="none")
    largest = centred.abs().argmax()
    alpha = case.param("f_norm", 1.0) * advantages[largest] / centred[largest]
    return {"advantages": advantages, "alpha": alpha}


def check_gdpo(case: Case) -> Results:
    names = sorted(key for key in case.inputs if key.startswith("reward"))
    parts = torch.stack([case.floats(name) for name in names], dim=1)
    options: dict[str, Any] = {
        key: case.params[key] for key in ("ddof", "eps", "weights") if key in case.params
    }

    def run(normalise_batch: bool) -> Tensor:
        return gdpo(
            parts.sum(dim=1),
            case.groups(),
            reward_parts=parts,
            normalise_batch=normalise_batch,
            **options,
        )

    return {"before_batch_norm": run(False), "per_response": run(True)}


def check_overlong(case: Case) -> Results:
    penalty = overlong_penalty(
        case.ints("lengths"),
        max_length=case.params["max_len"],
        cache=case.params["cache"],
        factor=case.param("factor", 1.0),
    )
    return {"penalty": penalty}
