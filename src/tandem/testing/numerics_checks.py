"""One check for each algorithm name of a numerics file: from a case's inputs to computed values.

What belongs here: translating a case into calls of the library and naming the results as the file
does. What does not: formulas (``algorithms``), comparing and printing (``numerics``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Barrier
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from tandem.algorithms.advantages.gae import gae
from tandem.algorithms.advantages.gdpo import gdpo
from tandem.algorithms.advantages.grpo import dr_grpo, grpo, grpo_loo
from tandem.algorithms.advantages.pass_at_k import grpo_passk
from tandem.algorithms.advantages.reinforce import remax
from tandem.algorithms.advantages.reinforce_plus_plus import (
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
)
from tandem.algorithms.advantages.reweighted import gpg, maxrl, opo
from tandem.algorithms.advantages.rloo import rloo
from tandem.algorithms.aggregation import AGGREGATION_MODES, loss_weights
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
from tandem.algorithms.kl import AdaptiveKL, kl_estimate, kl_importance_weighted
from tandem.algorithms.mismatch import mismatch_metrics
from tandem.algorithms.objective import PolicyObjective
from tandem.algorithms.policy import POLICY_LOSSES
from tandem.algorithms.policy.covariance import (
    clip_cov_candidates,
    kl_cov,
    select_clip_cov,
    select_kl_cov,
    token_covariance,
)
from tandem.algorithms.preference import (
    bradley_terry,
    last_token_scores,
    pair_accuracy,
    preference_loss,
    preference_margin,
)
from tandem.algorithms.sft import sft_loss
from tandem.algorithms.shaping import kl_shaped_rewards, overlong_penalty, score_on_last_token
from tandem.algorithms.tokens import (
    Reduce,
    clamped_ratio,
    logprobs_and_entropy,
    masked_mean,
    masked_var,
    masked_whiten,
)
from tandem.algorithms.value import value_loss

Results = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One case of the file, with its arrays as tensors of ``dtype``."""

    id: str
    inputs: Mapping[str, Any]
    params: Mapping[str, Any]
    dtype: torch.dtype

    def __contains__(self, key: str) -> bool:
        return key in self.inputs

    def floats(self, key: str) -> Tensor:
        return torch.tensor(decode(self.inputs[key]), dtype=self.dtype)

    def ints(self, key: str) -> Tensor:
        return torch.tensor(self.inputs[key], dtype=torch.int64)

    def mask(self, key: str = "mask") -> Tensor:
        return torch.tensor(self.inputs[key]).bool()

    def groups(self) -> Tensor:
        names = sorted(set(self.inputs["group"]))
        return torch.tensor([names.index(name) for name in self.inputs["group"]])

    def param(self, key: str, default: Any = None) -> Any:
        value = self.params.get(key, default)
        return default if value is None else value

    def renamed(self, **names: str) -> dict[str, Any]:
        """The parameters the case has, under our names: ``renamed(clip_low="eps_low")``."""
        return {our: self.params[key] for our, key in names.items() if key in self.params}


def decode(value: Any) -> Any:
    """Nested lists of numbers with ``"nan"``, ``"inf"`` and ``"-inf"`` made floats."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    return float(value)


def over_ranks(calls: Sequence[Callable[[Reduce], Tensor]]) -> list[Tensor]:
    """Run one call a rank, with a ``reduce`` that sums over all of them."""
    barrier = Barrier(len(calls))
    slots: list[Tensor] = [torch.empty(0)] * len(calls)

    def run(rank: int) -> Tensor:
        def reduce(local: Tensor) -> Tensor:
            slots[rank] = local
            barrier.wait()
            total = torch.stack(slots).sum(dim=0)
            barrier.wait()
            return total

        return calls[rank](reduce)

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, range(len(calls))))


# --- tokens ---------------------------------------------------------------------------------------


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


# --- advantages -----------------------------------------------------------------------------------


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
    scope = "batch" if "batch" in case.id else "group" if case.param("std", True) else "none"
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


# --- policy losses --------------------------------------------------------------------------------


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
    results["ppo_token_mean_loss"] = policy("ppo_clip", **_PPO)(usual)["token-mean"]
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


# --- corrections ----------------------------------------------------------------------------------


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


# --- divergence -----------------------------------------------------------------------------------


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


# --- critics, preferences, supervised -------------------------------------------------------------


def check_value_loss(case: Case) -> Results:
    mask = case.mask()
    loss_BT, stats = value_loss(
        case.floats("values"),
        case.floats("old_values"),
        case.floats("returns"),
        mask,
        clip=case.param("clip"),
    )
    results: Results = {"per_token": 2.0 * loss_BT, "loss": masked_mean(loss_BT, mask)}
    if stats:
        results["clipfrac"] = masked_mean(stats["vf_clipfrac"].to(case.dtype), mask)
    return results


def preference(loss_type: str) -> Callable[[Case], Results]:
    def check(case: Case) -> Results:
        names = ("policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected")
        lengths = {k: case.floats(k) for k in ("len_chosen", "len_rejected") if k in case}
        margin = preference_margin(*(case.floats(name) for name in names), **lengths)
        options = {k: case.params[k] for k in ("beta", "label_smoothing") if k in case.params}
        losses = preference_loss(margin, loss_type, **options)
        return {
            "logits": margin,
            "losses": losses,
            "loss": losses.mean(),
            "accuracy": pair_accuracy(margin, torch.zeros_like(margin)),
        }

    return check


def check_bradley_terry(case: Case) -> Results:
    chosen, rejected = case.floats("chosen"), case.floats("rejected")
    losses = bradley_terry(chosen, rejected, case.floats("margin") if "margin" in case else None)
    return {"losses": losses, "loss": losses.mean(), "accuracy": pair_accuracy(chosen, rejected)}


def check_reward_model(case: Case) -> Results:
    return {"scores": last_token_scores(case.floats("token_scores"), case.mask("attention_mask"))}


def check_sft(case: Case) -> Results:
    """Micro-batches of one row each, summed, as an engine runs them."""
    if "labels" in case:
        mask = (case.ints("labels") != -100)[None]
        logprobs = torch.full(mask.shape, torch.nan, dtype=case.dtype)
    else:
        tokens = case.ints("tokens")
        mask = torch.arange(int(tokens.max())) < tokens[:, None]
        logprobs = -(case.floats("nll_sums") / tokens)[:, None].expand(mask.shape)
    weights = loss_weights("token-mean", mask, dtype=case.dtype)
    total = torch.zeros((), dtype=case.dtype)
    for row in range(mask.shape[0]):
        part = slice(row, row + 1)
        microbatch = TensorDict(
            {"loss_mask": mask[part], "loss_weights": weights[part]}, batch_size=[1]
        )
        loss, _ = sft_loss({"train_logprobs": logprobs[part]}, microbatch)
        total = total + loss
    return {"loss": total}


_PPO = {"clip_low": "eps_low", "clip_high": "eps_high", "dual_clip": "clip_c"}

CHECKS: dict[str, Callable[[Case], Results]] = {
    "token_logprob+entropy": check_logprobs,
    "importance_ratio": check_importance_ratio,
    "entropy": check_entropy,
    "masked_mean": check_masked_moments,
    "masked_var": check_masked_moments,
    "masked_whiten": check_whiten,
    "gae": check_gae,
    "gae+whiten": check_gae_whitened,
    "token_reward": check_token_reward,
    "adaptive_kl": check_adaptive_kl,
    "grpo": check_grpo,
    "dr_grpo": outcome(dr_grpo),
    "grpo_loo": outcome(grpo_loo, "eps"),
    "grpo_passk": outcome(grpo_passk, "std", "ddof", "eps"),
    "rloo": outcome(rloo),
    "maxrl": outcome(maxrl, "eps"),
    "reinforce_plus_plus": check_reinforce_plus_plus,
    "reinforce_plus_plus_baseline": check_reinforce_plus_plus_baseline,
    "remax": check_remax,
    "opo": check_opo,
    "gpg": check_gpg,
    "gdpo": check_gdpo,
    "overlong_penalty": check_overlong,
    "clip_higher": policy("ppo_clip", **_PPO),
    "ppo_clip": policy("ppo_clip", **_PPO),
    "dual_clip": policy("ppo_clip", **_PPO),
    "loss_aggregation": check_aggregation,
    "gspo": check_gspo,
    "cispo": policy("cispo", clip_low="eps_low", clip_high="eps_high"),
    "sapo": policy("sapo", "seq-mean-token-mean", tau_positive="tau_pos", tau_negative="tau_neg"),
    "geo_mean": policy(
        "gmpo", "seq-mean-token-mean", clip_low="log_clip_low", clip_high="log_clip_high"
    ),
    "dppo": check_dppo,
    "clip_cov": check_clip_cov,
    "kl_cov": check_kl_cov,
    "reinforce": policy("reinforce", "seq-mean-token-sum"),
    "tis": check_tis,
    "icepop": check_icepop,
    "mis": check_mis,
    "veto": check_veto,
    "seq_mask_tis": check_seq_mask_tis,
    "mismatch": check_mismatch,
    "decoupled_ppo": check_decoupled,
    "prox_approx": check_prox_approx,
    "kl": check_kl,
    "value_loss": check_value_loss,
    "dpo": preference("sigmoid"),
    "hinge": preference("hinge"),
    "ipo": preference("ipo"),
    "bradley_terry": check_bradley_terry,
    "reward_model": check_reward_model,
    "sft": check_sft,
}
"""Algorithm name of a case -> its check."""
