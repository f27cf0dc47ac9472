"""Checks of token statistics, divergences and their gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tandem.algorithms.kl import kl_estimate, kl_importance_weighted
from tandem.algorithms.tokens import (
    Reduce,
    clamped_ratio,
    logprobs_and_entropy,
    masked_mean,
    masked_var,
    masked_whiten,
)
from tandem.testing.numerics.case import Case, Results, over_ranks


def check_logprobs(case: Case) -> Results:
    logprobs, entropy = logprobs_and_entropy(
        case.floats("logits"), case.ints("labels"), case.param("temperature", 1.0)
    )
    return {"logprobs": logprobs, "entropy": entropy}


def check_entropy(case: Case) -> Results:
    logits = case.floats("logits").requires_grad_()
    labels = torch.zeros(logits.shape[:-1], dtype=torch.int64)
    _, entropy = logprobs_and_entropy(logits, labels, case.param("temperature", 1.0))
    (grad,) = torch.autograd.grad(entropy.sum(), logits)
    return {"entropy": entropy, "grad": grad}


def check_importance_ratio(case: Case) -> Results:
    logits, labels = case.floats("logits"), case.ints("labels")
    sampled, _ = logprobs_and_entropy(logits, labels, case.params["T_sample"])
    wrong, _ = logprobs_and_entropy(logits, labels, case.params["T_score_wrong"])
    return {
        "logp_sample": sampled,
        "logp_wrong": wrong,
        "ratio_wrong": clamped_ratio(wrong - sampled),
        "ratio_right": clamped_ratio(sampled - sampled),
    }


def check_masked_moments(case: Case) -> Results:
    x, mask = case.floats("x"), case.mask()
    return {"mean": masked_mean(x, mask), "var": masked_var(x, mask, ddof=case.param("ddof", 1))}


def check_whiten(case: Case) -> Results:
    options = {k: case.params[k] for k in ("ddof", "eps", "form", "shift_mean") if k in case.params}
    if "x" in case:
        return {"out": masked_whiten(case.floats("x"), case.mask(), **options)}
    names = sorted(key for key in case.inputs if key.startswith("rank"))

    def of_rank(x: Tensor) -> Callable[[Reduce], Tensor]:
        mask = torch.ones_like(x, dtype=torch.bool)
        return lambda reduce: masked_whiten(x, mask, reduce=reduce, **options)

    outputs = over_ranks([of_rank(case.floats(name)) for name in names])
    return dict(zip(names, outputs, strict=True))


def check_kl(case: Case) -> Results:
    if "pi" in case:
        return _kl_expectations(case)
    if "logits" in case:
        return _kl_expected_gradients(case)
    logprobs, ref = case.floats("logp").requires_grad_(), case.floats("ref_logp")
    if "old_logp" in case:
        kl = kl_importance_weighted(logprobs, case.floats("old_logp"), ref)
        return {"kl": kl, "grad_logp": torch.autograd.grad(kl.sum(), logprobs)[0]}
    clamps = {"in_clamp": case.param("in_clamp"), "out_clamp": case.param("out_clamp")}
    results: Results = {
        name: kl_estimate(logprobs, ref, name, **clamps) for name in ("k1", "k2", "k3", "abs")
    }
    for name in ("k1", "k2", "k3"):
        (grad,) = torch.autograd.grad(results[name].sum(), logprobs)
        results[f"grad_{name}"] = grad
    return results | {"grad_logp": results["grad_k3"]}


def _kl_expectations(case: Case) -> Results:
    pi, ref = case.floats("pi"), case.floats("ref")
    results: Results = {
        f"E_{name}": (pi * kl_estimate(pi.log(), ref.log(), name)).sum()
        for name in ("k1", "k2", "k3", "abs")
    }
    return results | {"kl": (pi * (pi / ref).log()).sum()}


def _kl_expected_gradients(case: Case) -> Results:
    """For each estimator ``sum_x pi(x) * d estimate(x) / d logits``, pi(x) held fixed."""
    logits, ref = case.floats("logits").requires_grad_(), case.floats("ref")
    log_p = torch.log_softmax(logits, dim=-1)
    terms = {"exact": (log_p.exp() * (log_p - ref.log())).sum()}
    for name in ("k1", "k2", "k3"):
        terms[f"E_grad_{name}"] = (log_p.detach().exp() * kl_estimate(log_p, ref.log(), name)).sum()
    return {
        name: torch.autograd.grad(term, logits, retain_graph=True)[0]
        for name, term in terms.items()
    }
