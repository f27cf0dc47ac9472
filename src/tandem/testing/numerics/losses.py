"""Checks of policy losses and of their aggregation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tandem.algorithms.aggregation import AGGREGATION_MODES, loss_weights
from tandem.algorithms.policy import POLICY_LOSSES
from tandem.algorithms.policy.covariance import (
    clip_cov_candidates,
    kl_cov,
    select_clip_cov,
    select_kl_cov,
    token_covariance,
)
from tandem.algorithms.tokens import (
    Reduce,
    masked_mean,
)
from tandem.testing.numerics.case import Case, Results, over_ranks

PPO_NAMES = {"clip_low": "eps_low", "clip_high": "eps_high", "dual_clip": "clip_c"}


def policy(name: str, default_mode: str = "token-mean", **names: str) -> Callable[[Case], Results]:
    """A check of the policy loss ``name``; ``names`` maps its parameters to the file's."""

    def check(case: Case) -> Results:
        logprobs = case.floats("logp").requires_grad_()
        old_key = next((k for k in ("old_logp", "behav_logp") if k in case), "logp")
        mask, advantages = case.mask(), case.floats("advantages")
        loss_BT, stats = POLICY_LOSSES[name](
            logprobs, case.floats(old_key), advantages, mask, **case.renamed(**names)
        )
        results = aggregated(case, loss_BT, mask)
        mode = case.param("mode", default_mode)
        (grad_token,) = torch.autograd.grad(loss_BT.sum(), logprobs, retain_graph=True)
        (grad_loss,) = torch.autograd.grad(results[mode], logprobs)
        results |= {
            "per_token": loss_BT,
            "loss": results[mode],
            "loss_token_mean": results["token-mean"],
            "token_mean": results["token-mean"],
            "grad_logp_per_token": grad_token,
            "grad_logp": grad_loss,
            "grad": grad_loss,
            "weight": torch.where(mask, -grad_token / advantages, 0.0),
        }
        if "pg_clipfrac" in stats:
            results["clipfrac"] = masked_mean(stats["pg_clipfrac"].to(case.dtype), mask)
            results["keep"] = mask & ~stats["pg_clipfrac"]
        if "ratio" in stats:
            first = mask.float().argmax(dim=1, keepdim=True)
            results["seq_ratio"] = stats["ratio"].gather(1, first)[:, 0]
        return results

    return check


def aggregated(case: Case, loss_BT: Tensor, mask: Tensor) -> Results:
    """``loss_BT`` under every aggregation mode that needs no missing parameter."""
    horizon = case.param("horizon")
    modes = [m for m in AGGREGATION_MODES if horizon or m != "seq-mean-token-sum-norm"]
    clean = torch.where(mask, loss_BT, 0.0)
    return {
        mode: (loss_weights(mode, mask, horizon=horizon, dtype=case.dtype) * clean).sum()
        for mode in modes
    }


def check_aggregation(case: Case) -> Results:
    if "rank0_loss" in case:
        return _aggregation_over_ranks(case)
    if "token_loss" in case:
        width = max(map(len, case.inputs["token_loss"]))
        loss_BT = torch.zeros(len(case.inputs["token_loss"]), width, dtype=case.dtype)
        mask = torch.zeros(loss_BT.shape, dtype=torch.bool)
        for row, losses in enumerate(case.inputs["token_loss"]):
            loss_BT[row, : len(losses)] = torch.tensor(losses, dtype=case.dtype)
            mask[row, : len(losses)] = not case.inputs["truncated"][row]
    else:
        loss_BT, mask = case.floats("loss"), case.mask()
    results = aggregated(case, loss_BT, mask)
    results["loss"] = results[case.param("mode", "token-mean")]
    results["denominator"] = int(mask.sum())
    return results


def _aggregation_over_ranks(case: Case) -> Results:
    losses = [case.floats("rank0_loss"), case.floats("rank1_loss")]
    size = case.params["dp_size"]

    def of_rank(loss_BT: Tensor) -> Callable[[Reduce], Tensor]:
        mask = torch.ones(loss_BT.shape, dtype=torch.bool)

        def run(reduce: Reduce) -> Tensor:
            return (
                loss_weights("token-mean", mask, reduce=reduce, dtype=case.dtype) * loss_BT
            ).sum()

        return run

    shares = over_ranks([of_rank(loss_BT) for loss_BT in losses])
    full = torch.cat([loss_BT.flatten() for loss_BT in losses]).mean()
    # A backend that averages gradients is undone by a factor of the number of ranks.
    scaled = [share * size for share in shares]
    return {
        "rank0": scaled[0],
        "rank1": scaled[1],
        "after_average": torch.stack(scaled).mean(),
        "full_batch": full,
    }


def check_gspo(case: Case) -> Results:
    results = policy("gspo", "seq-mean-token-mean", clip_low="eps_low", clip_high="eps_high")(case)
    usual = replace(case, params={"eps_low": 0.2, "eps_high": 0.2})
    results["ppo_token_mean_loss"] = policy("ppo_clip", **PPO_NAMES)(usual)["token-mean"]
    return results


def check_dppo(case: Case) -> Results:
    results = policy("dppo", delta_low="delta_low", delta_high="delta_high")(case)
    moved = case.floats("logp").exp() - case.floats("behav_logp").exp()
    return results | {"prob_diff": moved}


def check_clip_cov(case: Case) -> Results:
    logprobs, old, mask = case.floats("logp"), case.floats("old_logp"), case.mask()
    advantages = case.floats("advantages")
    covariance = token_covariance(logprobs, advantages, mask)
    eps = case.param("eps", 0.2)
    candidates = clip_cov_candidates(
        covariance,
        logprobs,
        old,
        advantages,
        mask,
        cov_low=case.params["lb"],
        cov_high=case.params["ub"],
        clip_low=eps,
        clip_high=eps,
    )
    _, stats = POLICY_LOSSES["ppo_clip"](
        logprobs, old, advantages, mask, clip_low=eps, clip_high=eps
    )
    chosen = select_clip_cov(candidates, mask, ratio=2e-4)
    return {
        "cov": covariance,
        "ppo_clipped": stats["pg_clipfrac"],
        "candidates": candidates,
        "n_selected_for_ratio_0_0002": int(chosen.sum()),
    }


def check_kl_cov(case: Case) -> Results:
    logprobs, old, mask = case.floats("logp"), case.floats("old_logp"), case.mask()
    advantages = case.floats("advantages")
    covariance = token_covariance(logprobs, advantages, mask)
    selected = select_kl_cov(covariance, mask, ratio=case.params["ratio"])
    loss_BT, _ = kl_cov(
        logprobs, old, advantages, mask, cov_selected=selected, beta=case.params["beta"]
    )
    return {
        "top_flat_index": selected.flatten().nonzero()[:, 0],
        "per_token": loss_BT,
        "loss": aggregated(case, loss_BT, mask)["token-mean"],
    }
