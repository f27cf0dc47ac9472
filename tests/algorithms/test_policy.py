import math

import pytest
import torch

from tandem.algorithms.policy import POLICY_LOSSES, ppo_clip
from tandem.algorithms.policy.covariance import (
    clip_cov,
    select_clip_cov,
    select_kl_cov,
    token_covariance,
)
from tandem.algorithms.preference import preference_loss, preference_margin
from tandem.errors import ConfigError, DataError
from tandem.testing.numerics.case import over_ranks

NAN = float("nan")


def tensor(*rows, **options):
    return torch.tensor(rows, dtype=torch.float64, **options)


def run(name, logprobs, old, advantages, mask, **params):
    if name in ("clip_cov", "kl_cov"):
        params["cov_selected"] = torch.zeros_like(mask)
    return POLICY_LOSSES[name](logprobs, old, advantages, mask, **params)


def single_token(advantage, ratio, **params):
    logprobs = tensor([math.log(ratio)], requires_grad=True)
    loss, stats = ppo_clip(
        logprobs, tensor([0.0]), tensor([advantage]), torch.tensor([[True]]), **params
    )
    loss.sum().backward()
    return loss.item(), logprobs.grad.item(), stats


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "slope"),
    [
        (1.0, 1.1, -1.1, -1.1),
        (1.0, 1.29, -1.28, 0.0),
        (1.0, 0.5, -0.5, -0.5),
        (-1.0, 0.79, 0.8, 0.0),
        (-1.0, 2.0, 2.0, 2.0),
    ],
)
def test_a_clipped_token_has_zero_gradient_and_others_the_ratio_times_advantage(
    advantage, ratio, loss, slope
):
    got_loss, got_slope, stats = single_token(advantage, ratio, clip_low=0.2, clip_high=0.28)
    assert got_loss == pytest.approx(loss)
    assert got_slope == pytest.approx(slope)
    assert stats["pg_clipfrac"].item() is (slope == 0.0)


def test_dual_clip_bounds_only_negative_advantages():
    assert single_token(1.0, 1.1, clip_high=0.2, dual_clip=3.0)[0] == pytest.approx(-1.1)
    loss, slope, stats = single_token(-1.0, 4.0, dual_clip=3.0)
    assert (loss, slope) == (pytest.approx(3.0), 0.0)
    assert stats["pg_clipfrac_dual"].item()


@pytest.mark.parametrize("c", [0.5, 1.0, NAN])
def test_dual_clip_of_one_or_less_is_refused(c):
    with pytest.raises(ConfigError, match="dual_clip: got"):
        single_token(1.0, 1.0, dual_clip=c)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_tokens_outside_the_mask_have_no_loss_and_no_gradient(name):
    logprobs = tensor([-1.0, NAN, -0.5], [-0.3, -0.2, NAN], requires_grad=True)
    old = tensor([-1.1, NAN, -0.4], [-0.3, -0.5, 3.0])
    advantages = tensor([1.0, NAN, 1.0], [-0.5, -0.5, 7.0])
    mask = torch.tensor([[True, False, True], [True, True, False]])
    loss, _ = run(name, logprobs, old, advantages, mask)
    assert loss[~mask].eq(0).all()
    loss.sum().backward()
    assert logprobs.grad[~mask].eq(0).all()
    assert logprobs.grad[mask].ne(0).any()


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_only_the_current_policy_gets_a_gradient(name):
    logprobs = tensor([-1.0, -0.5], requires_grad=True)
    old = tensor([-1.1, -0.4], requires_grad=True)
    advantages = tensor([1.0, 1.0], requires_grad=True)
    loss, stats = run(name, logprobs, old, advantages, torch.ones(1, 2, dtype=torch.bool))
    loss.sum().backward()
    assert old.grad is None
    assert advantages.grad is None
    assert not any(value.requires_grad for value in stats.values())


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_on_policy_gradient_is_minus_the_advantage(name):
    logprobs = tensor([-1.0, -2.0, -0.3], requires_grad=True)
    advantages = tensor([0.7, 0.7, 0.7])
    loss, _ = run(name, logprobs, logprobs.detach(), advantages, torch.ones(1, 3).bool())
    loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, -advantages)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_extreme_ratios_stay_finite_in_float32(name):
    logprobs = torch.tensor([[-300.0, 0.0]], requires_grad=True)
    loss, _ = run(
        name, logprobs, torch.tensor([[0.0, -300.0]]), torch.ones(1, 2), torch.ones(1, 2).bool()
    )
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logprobs.grad.isfinite().all()


def test_gspo_gives_each_token_the_sequence_ratio_times_its_own_advantage():
    logprobs = tensor([-1.0, -1.0], requires_grad=True)
    loss, _ = run(
        "gspo",
        logprobs,
        tensor([-1.2, -1.0]),
        tensor([2.0, -1.0]),
        torch.ones(1, 2, dtype=torch.bool),
        clip_low=0.5,
        clip_high=0.5,
    )
    loss.sum().backward()
    s = math.exp(0.1)
    assert logprobs.grad[0].tolist() == pytest.approx([-2 * s, s])


def test_zero_variance_group_stays_in_the_denominator():
    from tandem.algorithms.aggregation import loss_weights

    logprobs = torch.zeros(4, 1, requires_grad=True)
    mask = torch.ones(4, 1, dtype=torch.bool)
    advantages = torch.tensor([[0.0], [0.0], [0.5], [-0.5]])
    loss_BT, _ = ppo_clip(logprobs, torch.zeros(4, 1), advantages, mask)
    loss = (loss_weights("token-mean", mask) * loss_BT).sum()
    loss.backward()
    assert loss.item() == 0.0
    torch.testing.assert_close(logprobs.grad[:, 0], torch.tensor([0, 0, -0.125, 0.125]))


def test_negative_or_nan_clip_bounds_are_refused():
    with pytest.raises(ConfigError, match=r"clip_low: got -0\.1"):
        single_token(1.0, 1.0, clip_low=-0.1)
    with pytest.raises(ConfigError, match="clip_high: got nan"):
        single_token(1.0, 1.0, clip_high=NAN)


# --- covariance -----------------------------------------------------------------------------------


def test_selection_takes_the_largest_over_all_ranks():
    covariance = torch.tensor([[0.5, -3.0, 2.0, 0.1], [7.0, 0.2, 0.3, -1.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 1]])
    whole = select_kl_cov(covariance, mask, ratio=0.45)
    assert whole.nonzero().tolist() == [[0, 0], [0, 2], [1, 0]]
    shards = over_ranks(
        [
            lambda reduce, r=row: select_kl_cov(
                covariance[r : r + 1], mask[r : r + 1], ratio=0.45, reduce=reduce
            )
            for row in range(2)
        ]
    )
    assert torch.cat(shards).equal(whole)


def test_random_selection_has_the_stated_size_and_only_candidates():
    candidates = torch.arange(40).reshape(4, 10) % 3 == 0
    generator = torch.Generator().manual_seed(0)
    picked = [
        select_clip_cov(candidates, torch.ones(4, 10), ratio=0.1, generator=generator)
        for _ in range(20)
    ]
    assert all(int(p.sum()) == 4 and not bool((p & ~candidates).any()) for p in picked)
    assert len({tuple(p.flatten().tolist()) for p in picked}) > 1
    few = torch.zeros(4, 10, dtype=torch.bool)
    few[1, 2] = True
    assert select_clip_cov(few, torch.ones(4, 10), ratio=0.5).equal(few)
    assert not select_clip_cov(few & False, torch.ones(4, 10), ratio=0.5).any()


def test_covariance_centres_over_the_mask():
    logprobs, advantages = torch.tensor([[-1.0, -3.0, NAN]]), torch.tensor([[2.0, 0.0, NAN]])
    covariance = token_covariance(logprobs, advantages, torch.tensor([[1, 1, 0]]))
    torch.testing.assert_close(covariance, torch.tensor([[1.0, 1.0, 0.0]]))


def test_selected_tokens_lose_their_gradient():
    logprobs = torch.zeros(1, 2, requires_grad=True)
    loss, _ = clip_cov(
        logprobs,
        torch.zeros(1, 2),
        torch.ones(1, 2),
        torch.ones(1, 2).bool(),
        cov_selected=torch.tensor([[True, False]]),
    )
    loss.sum().backward()
    assert logprobs.grad.tolist() == [[0.0, -1.0]]


# --- preferences ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss_type", "expected"), [("sigmoid", 0.437488), ("hinge", 0.4), ("ipo", 0.25)]
)
def test_every_preference_loss_has_its_own_value(loss_type, expected):
    loss = preference_loss(torch.tensor([3.0]), loss_type, beta=0.2)
    assert loss.item() == pytest.approx(expected, abs=1e-6)


def test_unknown_preference_loss_and_wrong_options_are_refused():
    with pytest.raises(ConfigError, match="loss_type: got 'foo', allowed: sigmoid, hinge, ipo"):
        preference_loss(torch.zeros(1), "foo")
    with pytest.raises(ConfigError, match="beta: got 0"):
        preference_loss(torch.zeros(1), beta=0)
    with pytest.raises(ConfigError, match=r"label_smoothing: got 0\.1"):
        preference_loss(torch.zeros(1), "ipo", label_smoothing=0.1)


def test_ipo_on_sums_and_on_means():
    one, zero = torch.tensor([1.0]), torch.tensor([0.0])
    summed = preference_margin(one, zero, zero, zero)
    lengths = {"len_chosen": torch.tensor([5]), "len_rejected": torch.tensor([4])}
    averaged = preference_margin(one, zero, zero, zero, **lengths)
    assert preference_loss(summed, "ipo", beta=0.1).item() == pytest.approx(16.0)
    assert preference_loss(averaged, "ipo", beta=0.1).item() == pytest.approx(23.04)
    with pytest.raises(DataError, match="got only one"):
        preference_margin(one, zero, zero, zero, len_chosen=torch.tensor([5]))


D = [[0.3, -0.5, 0.45, 9.0], [0.5, -0.6, 0.05, 9.0]]
"""Log-ratios of two responses of three tokens; the fourth is outside the mask."""
A = (2.0, -1.0)


def sapo_slope(d, advantage):
    tau = 1.0 if advantage > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (math.exp(d) - 1)))
    return -4 * advantage * math.exp(d) * gate * (1 - gate)


def gmpo_slopes(row, advantage):
    held = [max(-0.4, d) if advantage < 0 else min(0.4, d) for d in row]
    mean = math.exp(sum(held) / 3)
    return [-advantage * mean * float(d == h) for d, h in zip(row, held, strict=True)]


@pytest.mark.parametrize(
    ("name", "params", "slopes"),
    [
        ("reinforce", {}, [[-2, -2, -2], [1, 1, 1]]),
        (
            "cispo",
            {"clip_low": 0.2, "clip_high": 0.4},
            [[-2 * math.exp(0.3), -1.6, -2.8], [1.4, 0.8, math.exp(0.05)]],
        ),
        ("sapo", {}, [[sapo_slope(d, a) for d in row[:3]] for row, a in zip(D, A, strict=True)]),
        # p_old is 0.4: the third token of the first row and the second of the other have moved by
        # 0.4 (exp(0.45) - 1) = 0.227 and 0.4 (1 - exp(-0.6)) = 0.180, the rest by less or back.
        (
            "dppo",
            {},
            [
                [-2 * math.exp(0.3), -2 * math.exp(-0.5), 0.0],
                [math.exp(0.5), 0.0, math.exp(0.05)],
            ],
        ),
        ("gmpo", {}, [gmpo_slopes(row[:3], a) for row, a in zip(D, A, strict=True)]),
        (
            "clip_cov",
            {"clip_high": 0.4},
            [[0.0, -2 * math.exp(-0.5), 0.0], [math.exp(0.5), 0.0, math.exp(0.05)]],
        ),
        (
            "kl_cov",
            {"beta": 0.7},
            [
                [-2 * math.exp(0.3) + 0.7, -2 * math.exp(-0.5), -2 * math.exp(0.45)],
                [math.exp(0.5), math.exp(-0.6), math.exp(0.05)],
            ],
        ),
    ],
)
def test_gradients_away_from_the_old_policy_in_closed_form(name, params, slopes):
    mask = torch.tensor([[True, True, True, False]] * 2)
    old = torch.full((2, 4), math.log(0.4), dtype=torch.float64)
    logprobs = (old + tensor(*D)).requires_grad_()
    advantages = tensor([A[0]] * 4, [A[1]] * 4)
    if name.endswith("_cov"):
        selected = torch.zeros_like(mask)
        selected[0, 0] = True
        params = params | {"cov_selected": selected}
    loss, _ = POLICY_LOSSES[name](logprobs, old, advantages, mask, **params)
    loss.sum().backward()
    assert logprobs.grad[:, 3].tolist() == [0.0, 0.0]
    assert logprobs.grad[:, :3].tolist() == [pytest.approx(row) for row in slopes]
