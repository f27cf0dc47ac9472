import math

import pytest
import torch

from tandem.algorithms.kl import AdaptiveKL, kl_estimate
from tandem.errors import ConfigError

LOGPROBS, REF = -1.0, -2.0


def value_and_gradient(estimator, **options):
    logprobs = torch.tensor(LOGPROBS, dtype=torch.float64, requires_grad=True)
    ref = torch.tensor(REF, dtype=torch.float64, requires_grad=True)
    kl = kl_estimate(logprobs, ref, estimator, **options)
    kl.backward()
    assert ref.grad is None
    return kl.item(), logprobs.grad.item()


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        ("k1", 1.0, 1.0),
        ("k2", 0.5, 1.0),
        ("k3", math.exp(-1), 1 - math.exp(-1)),
        ("abs", 1.0, 1.0),
    ],
)
def test_value_and_slope_for_a_policy_above_the_reference(estimator, value, slope):
    assert value_and_gradient(estimator) == pytest.approx((value, slope), abs=1e-12)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_descent_step_moves_the_policy_towards_the_reference(estimator):
    _, slope = value_and_gradient(estimator)
    assert LOGPROBS - 0.1 * slope < LOGPROBS
    assert kl_estimate(torch.tensor(-1.1), torch.tensor(REF), estimator) < kl_estimate(
        torch.tensor(LOGPROBS), torch.tensor(REF), estimator
    )


def test_k2_gradient_keeps_the_value_of_the_estimator():
    assert value_and_gradient("k3", gradient="k2") == pytest.approx((math.exp(-1), 1.0))


def test_auto_replaces_the_gradient_of_k1_only():
    logits = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()
    log_p = torch.log_softmax(logits, -1)
    exact = torch.autograd.grad((log_p.exp() * (log_p - ref)).sum(), logits, retain_graph=True)[0]

    def expected_gradient(estimator, gradient):
        kl = kl_estimate(log_p, ref, estimator, gradient=gradient)
        return torch.autograd.grad((log_p.detach().exp() * kl).sum(), logits, retain_graph=True)[0]

    torch.testing.assert_close(expected_gradient("k1", "auto"), exact)
    assert expected_gradient("k1", "own").abs().max() < 1e-12
    for name in ("k2", "k3", "abs"):
        torch.testing.assert_close(expected_gradient(name, "auto"), expected_gradient(name, "own"))


def test_abs_pulls_down_the_total_variation():
    logits = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    log_p = torch.log_softmax(logits, -1)
    estimate = (log_p.detach().exp() * kl_estimate(log_p, ref.log(), "abs")).sum()
    (got,) = torch.autograd.grad(estimate, logits, retain_graph=True)
    (expected,) = torch.autograd.grad((log_p.exp() - ref).abs().sum(), logits)
    torch.testing.assert_close(got, expected)


def test_extreme_log_ratios_stay_finite_in_float32():
    kl = kl_estimate(torch.tensor([-500.0, 0.0]), torch.tensor([0.0, -500.0]), "k3")
    assert kl.isfinite().all()


def test_unknown_names_are_refused():
    with pytest.raises(ConfigError, match="kl_estimator: got 'k4', allowed: k1, k2, k3, abs"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
    with pytest.raises(ConfigError, match="kl_gradient: got 'k1'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), gradient="k1")


def test_adaptive_coefficient_rises_above_target_and_falls_below():
    controller = AdaptiveKL(0.1, target=1.0, horizon=100)
    assert controller.updated(5.0, 10).coef == pytest.approx(0.1 * 1.02)
    assert controller.updated(0.0, 10).coef == pytest.approx(0.1 * 0.98)
    assert controller.updated(1.0, 10).coef == 0.1
    with pytest.raises(ConfigError, match=r"AdaptiveKL\.target: got 0"):
        AdaptiveKL(0.1, target=0, horizon=1)
