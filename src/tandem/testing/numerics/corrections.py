"""Checks of behaviour corrections and mismatch diagnostics."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from tandem.algorithms.aggregation import loss_weights
from tandem.algorithms.correction import (
    behaviour_correction,
    geometric_ratio,
    icepop,
    mis,
    prox_loglinear,
    seq_mask_tis,
    tis,
    veto,
)
from tandem.algorithms.mismatch import mismatch_metrics
from tandem.algorithms.objective import PolicyObjective
from tandem.algorithms.tokens import (
    clamped_ratio,
    masked_mean,
)
from tandem.testing.numerics.case import Case, Results


def _prox_and_sampler(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    return case.floats("train_logp"), case.floats("rollout_logp"), case.mask()


def check_tis(case: Case) -> Results:
    normalise = "normalised" in case.id
    triple = _prox_and_sampler(case)
    plain, _ = tis(*triple, cap=case.params["cap"])
    weights, _ = tis(*triple, cap=case.params["cap"], normalise=normalise)
    return {"weights": weights, "mean": masked_mean(plain, case.mask())}


def check_icepop(case: Case) -> Results:
    weights, _ = icepop(*_prox_and_sampler(case), low=case.params["lo"], high=case.params["hi"])
    return {"weights": weights, "denominator": int(case.mask().sum())}


def check_mis(case: Case) -> Results:
    triple = _prox_and_sampler(case)
    band = {"low": case.params["lo"], "high": case.params["hi"]}
    _, kept = mis(*triple, **band)
    _, kept_rows = mis(*triple, level="sequence", **band)
    return {
        "mask": kept,
        "denominator": int(kept.sum()),
        "geometric": geometric_ratio(*triple),
        "keep": kept_rows.any(dim=1),
    }


def check_veto(case: Case) -> Results:
    prox, sampler, mask = _prox_and_sampler(case)
    _, kept = veto(prox, sampler, mask, low=case.params["veto_low"])
    ratios = torch.where(mask, clamped_ratio(prox - sampler), torch.inf)
    return {"min_ratio": ratios.amin(dim=1), "keep": kept.any(dim=1)}


def check_seq_mask_tis(case: Case) -> Results:
    triple = _prox_and_sampler(case)
    weights, kept = seq_mask_tis(
        *triple, low=case.params["lo"], high=case.params["hi"], cap=case.param("token_cap")
    )
    return {"geometric": geometric_ratio(*triple), "keep": kept.any(dim=1), "weights": weights}


def check_mismatch(case: Case) -> Results:
    if "log_ratio" in case:
        return {"ratio": clamped_ratio(case.floats("log_ratio"), bound=case.param("bound", 20.0))}
    metrics = mismatch_metrics(*_prox_and_sampler(case))
    return {
        "k1": metrics["mismatch/kl"],
        "k3": metrics["mismatch/k3"],
        "ess_token": metrics["mismatch/ess"],
        "abs_diff_mean": metrics["mismatch/logprob_abs_diff"],
        "abs_diff_max": metrics["mismatch/logprob_abs_diff_max"],
    }


def check_decoupled(case: Case) -> Results:
    """The whole path of an optimizer step: correction, weights, objective."""
    logprobs, mask = case.floats("logp").requires_grad_(), case.mask()
    batch = TensorDict(
        {
            "loss_mask": mask,
            "prox_logprobs": case.floats("prox_logp"),
            "logprobs": case.floats("behav_logp"),
            "advantages": case.floats("advantages"),
        },
        batch_size=[mask.shape[0]],
    )
    batch, _ = behaviour_correction(batch, cap=case.param("cap", float("inf")))
    batch["loss_weights"] = loss_weights("token-mean", batch["loss_mask"], dtype=case.dtype)
    eps = case.param("eps", 0.2)
    objective = PolicyObjective(policy_kwargs={"clip_low": eps, "clip_high": eps})
    loss, _ = objective({"train_logprobs": logprobs}, batch)
    (grad,) = torch.autograd.grad(loss, logprobs)
    weights = batch["behaviour_weights"]
    return {"kept": mask & (weights > 0), "loss": loss, "grad_logp": grad, "weights": weights}


def check_prox_approx(case: Case) -> Results:
    logprobs, sampler = case.floats("logp"), case.floats("behav_logp")
    prox = prox_loglinear(
        logprobs,
        sampler,
        sampler_versions=case.ints("v_behav"),
        prox_version=case.ints("v_prox"),
        current_version=case.ints("v_theta"),
    )
    return {"prox_logp": prox, "alpha": (prox - sampler) / (logprobs - sampler)}
