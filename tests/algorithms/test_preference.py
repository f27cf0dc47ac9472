"""Preference losses in closed form: values, gradients, and where none may flow."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from tandem.algorithms import get_loss
from tandem.algorithms.preference import (
    bradley_terry,
    kto_loss,
    orpo_loss,
    preference_loss,
    preference_margin,
    simpo_loss,
)
from tandem.algorithms.preference_objective import (
    PAIR_LOSSES,
    KTOObjective,
    PairObjective,
    RewardObjective,
    pair_rows,
    response_sums,
)
from tandem.algorithms.value import ValueObjective
from tandem.errors import ConfigError, DataError
from tests.tolerance import assert_close

F64 = torch.float64


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64, requires_grad=True)


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def grad_of(loss: Tensor, *inputs: Tensor) -> list[float]:
    return [float(g) for g in torch.autograd.grad(loss.sum(), inputs)]


# --- formulas -------------------------------------------------------------------------------------


def test_each_loss_type_changes_the_value_and_an_unknown_one_is_named() -> None:
    """B36: h = 3, beta = 0.2."""
    for name, value in (("sigmoid", 0.437488), ("hinge", 0.4), ("ipo", 0.25)):
        found = preference_loss(torch.tensor([3.0], dtype=F64), name, beta=0.2)
        assert float(found) == pytest.approx(value, abs=1e-6)
    for build in (lambda: preference_loss(torch.zeros(1), "foo"), lambda: PairObjective("foo")):
        with pytest.raises(ConfigError, match="'foo'"):
            build()


def test_ipo_sums_or_averages_over_tokens_as_stated() -> None:
    """B116: log-ratio sums +1 over 5 tokens and 0 over 4, beta 0.1."""
    zero = torch.zeros(1, dtype=F64)
    sums = (torch.ones(1, dtype=F64), zero, zero, zero)
    summed = preference_margin(*sums)
    averaged = preference_margin(
        *sums, len_chosen=torch.tensor([5]), len_rejected=torch.tensor([4])
    )
    assert float(preference_loss(summed, "ipo", beta=0.1)) == pytest.approx(16.0)
    assert float(preference_loss(averaged, "ipo", beta=0.1)) == pytest.approx(23.04)


@pytest.mark.parametrize(
    ("name", "options", "slope"),
    [
        ("sigmoid", {}, -0.3 * sigmoid(-0.3 * 1.7)),
        (
            "sigmoid",
            {"label_smoothing": 0.2},
            -0.3 * (0.8 * sigmoid(-0.3 * 1.7) - 0.2 * sigmoid(0.3 * 1.7)),
        ),
        (
            "robust",
            {"label_smoothing": 0.2},
            -0.3 * (0.8 * sigmoid(-0.3 * 1.7) + 0.2 * sigmoid(0.3 * 1.7)) / 0.6,
        ),
        ("hinge", {}, -0.3),
        ("ipo", {}, 2 * (1.7 - 1 / 0.6)),
    ],
)
def test_gradients_of_the_margin_losses(name: str, options: dict[str, float], slope: float) -> None:
    margin = leaf(1.7)
    loss = preference_loss(margin, name, beta=0.3, **options)
    assert grad_of(loss, margin) == pytest.approx([slope], rel=1e-12)


def test_hinge_has_no_gradient_beyond_its_margin() -> None:
    margin = leaf(10.1)
    assert grad_of(preference_loss(margin, "hinge", beta=0.1), margin) == [0.0]


def test_robust_loss_is_unbiased_under_flipped_labels() -> None:
    margin, noise = torch.tensor([0.8], dtype=F64), 0.3
    right = preference_loss(margin, "robust", beta=0.5, label_smoothing=noise)
    flipped = preference_loss(-margin, "robust", beta=0.5, label_smoothing=noise)
    clean = math.log(1 + math.exp(-0.5 * 0.8))
    assert float((1 - noise) * right + noise * flipped) == pytest.approx(clean, rel=1e-12)


def test_simpo_value_and_gradient() -> None:
    chosen, rejected = leaf(-0.7), leaf(-0.9)
    loss = simpo_loss(chosen, rejected, beta=2.0, gamma=0.5)
    x = 2.0 * 0.2 - 0.5
    assert float(loss.detach()) == pytest.approx(math.log(1 + math.exp(-x)), rel=1e-12)
    slope = -2.0 * sigmoid(-x)
    assert grad_of(loss, chosen, rejected) == pytest.approx([slope, -slope], rel=1e-12)


def test_orpo_value_and_gradient() -> None:
    chosen, rejected = leaf(-0.7), leaf(-0.9)
    loss = orpo_loss(chosen, rejected, beta=0.5)
    p, q = math.exp(-0.7), math.exp(-0.9)
    ratio = math.log(p / (1 - p)) - math.log(q / (1 - q))
    expected = 0.7 + 0.5 * math.log(1 + math.exp(-ratio))
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-12)
    # d log odds / d log p = 1 / (1 - p)
    slope = 0.5 * sigmoid(-ratio)
    expected_grads = [-1 - slope / (1 - p), slope / (1 - q)]
    assert grad_of(loss, chosen, rejected) == pytest.approx(expected_grads, rel=1e-12)


def test_orpo_is_finite_for_a_response_that_is_certain() -> None:
    chosen = torch.zeros(1, requires_grad=True)
    loss = orpo_loss(chosen, torch.tensor([-1.0]))
    assert math.isfinite(float(loss.detach()))
    assert math.isfinite(grad_of(loss, chosen)[0])


def test_kto_value_and_gradient_of_both_kinds() -> None:
    ratio, baseline = leaf(1.2, 1.2), leaf(0.4)
    liked = torch.tensor([True, False])
    options = {"beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 2.0}
    loss = kto_loss(ratio, liked, baseline, **options)
    s = sigmoid(0.5 * 0.8)
    assert_close(loss.detach(), torch.tensor([1.5 * (1 - s), 2.0 * s], dtype=F64))
    loss.sum().backward()
    assert ratio.grad is not None
    slope = 0.5 * s * (1 - s)
    assert_close(ratio.grad, torch.tensor([-1.5 * slope, 2.0 * slope], dtype=F64))
    assert baseline.grad is None


def test_bradley_terry_value_and_gradient_with_a_margin() -> None:
    chosen, rejected = leaf(1.0), leaf(0.3)
    loss = bradley_terry(chosen, rejected, torch.tensor([0.5], dtype=F64))
    assert float(loss.detach()) == pytest.approx(math.log(1 + math.exp(-0.2)), rel=1e-12)
    slope = sigmoid(-0.2)
    assert grad_of(loss, chosen, rejected) == pytest.approx([-slope, slope], rel=1e-12)


@pytest.mark.parametrize(
    "build",
    [
        lambda: PairObjective(beta=0.0),
        lambda: PairObjective("orpo", beta=-1.0),
        lambda: PairObjective("hinge", label_smoothing=0.1),
        lambda: PairObjective("simpo", length_normalised=False),
        lambda: PairObjective("orpo", label_smoothing=0.1),
        lambda: PairObjective(label_smoothing=0.5),
        lambda: get_loss("preference", no_such=1),
    ],
)
def test_options_that_a_loss_does_not_have_are_refused(build: Any) -> None:
    with pytest.raises(ConfigError):
        build()


# --- objectives -----------------------------------------------------------------------------------

LOGPROBS = [
    [0.0, -9.0, -0.5, -1.0, 0.0],
    [0.0, -9.0, -2.0, 0.0, 0.0],
    [0.0, -1.5, -0.25, -0.5, -0.25],
    [0.0, -0.5, -0.1, 0.0, 0.0],
]
MASK = [[0, 0, 1, 1, 0], [0, 0, 1, 0, 0], [0, 1, 1, 1, 1], [0, 1, 1, 0, 0]]
REFERENCE = [-1.0, -1.75, -3.0, -0.5]


def batch(order: tuple[int, ...] = (0, 1, 2, 3)) -> TensorDict:
    """Two pairs: log-ratio sums -0.5 and -0.25, then +0.5 and -0.1."""
    rows = torch.tensor(order)
    fields = {
        "loss_mask": torch.tensor(MASK, dtype=torch.bool),
        "pair_ids": torch.tensor([4, 4, 9, 9]),
        "is_chosen": torch.tensor([True, False, True, False]),
        "loss_weights": torch.full((4,), 0.5, dtype=F64),
        "ref_logprob_sums": torch.tensor(REFERENCE, dtype=F64),
        "margins": torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=F64),
    }
    return TensorDict({k: v[rows] for k, v in fields.items()}, batch_size=[len(rows)])


def outputs(order: tuple[int, ...] = (0, 1, 2, 3)) -> dict[str, Tensor]:
    rows = torch.tensor(order)
    return {"train_logprobs": torch.tensor(LOGPROBS, dtype=F64)[rows].requires_grad_()}


def test_dpo_from_token_logprobs() -> None:
    loss, metrics = PairObjective(beta=0.2)(outputs(), batch())
    margins = [-0.5 - -0.25, 0.5 - -0.1]
    expected = sum(0.5 * math.log(1 + math.exp(-0.2 * h)) for h in margins)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-12)
    assert float(metrics["preference/accuracy"].value) == 0.5
    assert float(metrics["preference/margin"].value) == pytest.approx(0.2 * sum(margins) / 2)
    # Sums -1.5 > -2.0, and -2.5 < -0.6.
    assert float(metrics["preference/policy_accuracy"].value) == 0.5


def test_length_normalisation_divides_each_log_ratio_by_its_own_tokens() -> None:
    loss, metrics = PairObjective("ipo", beta=0.5)(outputs(), batch())
    margins = [-0.5 / 2 - -0.25 / 1, 0.5 / 4 - -0.1 / 2]
    expected = sum(0.5 * (h - 1.0) ** 2 for h in margins)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-12)
    # Means -0.75 > -2.0, and -0.625 < -0.3.
    assert float(metrics["preference/policy_accuracy"].value) == 0.5
    summed, _ = PairObjective("ipo", beta=0.5, length_normalised=False)(outputs(), batch())
    assert float(summed.detach()) == pytest.approx(0.5 * (-1.25) ** 2 + 0.5 * (0.6 - 1.0) ** 2)


def test_reference_free_losses_need_no_reference() -> None:
    without = batch().exclude("ref_logprob_sums")
    loss, _ = PairObjective("simpo", beta=2.0, gamma=0.5)(outputs(), without)
    gaps = [-0.75 - -2.0, -0.625 - -0.3]
    expected = sum(0.5 * math.log(1 + math.exp(-(2.0 * gap - 0.5))) for gap in gaps)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(DataError, match="ref_logprob_sums"):
        PairObjective()(outputs(), without)


def test_sft_coef_adds_the_chosen_responses_mean_loss() -> None:
    plain, _ = PairObjective()(outputs(), batch())
    more, _ = PairObjective(sft_coef=0.3)(outputs(), batch())
    assert float((more - plain).detach()) == pytest.approx(0.3 * 0.5 * (0.75 + 0.625), rel=1e-12)


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_gradient_flows_to_response_tokens_only(name: str) -> None:
    data, scored = batch(), outputs()
    data["ref_logprob_sums"].requires_grad_()
    loss, metrics = PairObjective(name, sft_coef=0.1)(scored, data)
    loss.backward()
    grad = scored["train_logprobs"].grad
    assert grad is not None
    mask = torch.tensor(MASK, dtype=torch.bool)
    assert not grad[~mask].any()
    assert (grad[mask] != 0).all()
    assert data["ref_logprob_sums"].grad is None
    assert not any(torch.as_tensor(metric.value).requires_grad for metric in metrics.values())


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_rows_may_come_in_any_order_and_pairs_in_any_cut(name: str) -> None:
    objective = PairObjective(name)
    whole = float(objective(outputs(), batch())[0].detach())
    order = (3, 1, 0, 2)
    assert float(objective(outputs(order), batch(order))[0].detach()) == pytest.approx(whole)
    parts = [(0, 1), (3, 2)]
    cut = sum(float(objective(outputs(part), batch(part))[0].detach()) for part in parts)
    assert cut == pytest.approx(whole, rel=1e-12)


def test_masked_logprobs_may_be_anything() -> None:
    scored = outputs()["train_logprobs"].detach().clone()
    scored[~torch.tensor(MASK, dtype=torch.bool)] = float("nan")
    loss, _ = PairObjective()({"train_logprobs": scored}, batch())
    assert float(loss) == pytest.approx(float(PairObjective()(outputs(), batch())[0].detach()))


def test_half_a_pair_and_empty_responses_are_refused() -> None:
    for order in ((0, 1, 2), (0, 2, 3, 1, 0)):
        with pytest.raises(DataError, match="pair_ids"):
            pair_rows(batch(order))
    with pytest.raises(DataError, match="row 1 has no response token"):
        response_sums(torch.zeros(2, 3), torch.tensor([[0, 1, 1], [0, 0, 0]]))


def test_kto_objective_from_token_logprobs() -> None:
    data = batch()
    data["kl_baselines"] = torch.full((4,), 0.1, dtype=F64)
    loss, metrics = KTOObjective(beta=0.5)(outputs(), data)
    gains = [-0.5 - 0.1, -(-0.25 - 0.1), 0.5 - 0.1, -(-0.1 - 0.1)]
    expected = sum(0.5 * (1 - sigmoid(0.5 * gain)) for gain in gains)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-12)
    assert float(metrics["preference/accuracy"].value) == 0.75
    assert float(metrics["preference/desirable_reward"].value) == pytest.approx(0.0)


def test_reward_objective_uses_margins_and_centres() -> None:
    scores = {"scores": torch.tensor([1.0, 0.2, -0.5, 0.1], dtype=F64)}
    loss, metrics = RewardObjective(center_coef=0.01)(scores, batch())
    pairs = [(1.0 - 0.2 - 0.5, 1.2), (-0.6, -0.4)]
    expected = sum(0.5 * (math.log(1 + math.exp(-d)) + 0.01 * s**2) for d, s in pairs)
    assert float(loss) == pytest.approx(expected, rel=1e-12)
    assert float(metrics["reward_model/accuracy"].value) == 0.5
    assert float(metrics["reward_model/margin"].value) == pytest.approx((0.8 - 0.6) / 2)
    plain, _ = RewardObjective()(scores, batch().exclude("margins"))
    expected = sum(0.5 * math.log(1 + math.exp(-d)) for d in (0.8, -0.6))
    assert float(plain) == pytest.approx(expected, rel=1e-12)


def test_value_objective_weighs_tokens_and_counts_clipped_ones() -> None:
    values = torch.tensor([[0.0, 1.0, 0.0]], dtype=F64, requires_grad=True)
    data = TensorDict(
        {
            "loss_mask": torch.tensor([[False, True, True]]),
            "values": torch.tensor([[0.0, 0.2, 0.1]], dtype=F64),
            "returns": torch.tensor([[9.0, 1.5, 0.4]], dtype=F64),
            "value_loss_weights": torch.tensor([[0.0, 0.25, 0.75]], dtype=F64),
        },
        batch_size=[1],
    )
    loss, metrics = ValueObjective(clip=0.3)({"values": values}, data)
    # Token 1: 0.2 + 0.3 is further from 1.5 than 1.0 is. Token 2 moved by less than the clip.
    expected = 0.25 * 0.5 * 1.0**2 + 0.75 * 0.5 * 0.4**2
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-12)
    loss.backward()
    assert values.grad is not None
    assert_close(values.grad, torch.tensor([[0.0, 0.0, 0.75 * -0.4]], dtype=F64))
    assert float(metrics["critic/vf_clipfrac"].value) == 0.5
    assert ValueObjective.required_outputs == {"values"}
