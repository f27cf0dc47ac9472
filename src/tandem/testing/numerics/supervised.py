"""Checks of critics, preferences, reward models and supervised losses."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDict

from tandem.algorithms.aggregation import loss_weights
from tandem.algorithms.preference import (
    bradley_terry,
    last_token_scores,
    pair_accuracy,
    preference_loss,
    preference_margin,
)
from tandem.algorithms.sft import sft_loss
from tandem.algorithms.tokens import (
    masked_mean,
)
from tandem.algorithms.value import value_loss
from tandem.testing.numerics.case import Case, Results


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
