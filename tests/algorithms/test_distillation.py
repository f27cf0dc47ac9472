"""Divergence from a teacher: values, closed-form gradients, and where no gradient may flow."""

import math

import pytest
import torch

from tandem.algorithms.advantages import assign_advantages
from tandem.algorithms.distillation import (
    DIVERGENCES,
    forward_kl_advantage,
    reverse_kl_advantage,
    topk_divergence,
)
from tandem.errors import ConfigError, DataError
from tests.algorithms.test_advantages import make_batch

V = 6


def distributions(seed=0):
    generator = torch.Generator().manual_seed(seed)
    student = torch.randn(V, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(V, generator=generator, dtype=torch.float64).log_softmax(-1)
    return student, teacher


@pytest.mark.parametrize("divergence", ["reverse", "forward"])
def test_expected_gradient_of_the_sampled_form_is_that_of_the_divergence(divergence):
    """Enumerate every token that could be sampled, each weighted by its probability."""
    logits, teacher = distributions()
    logp = logits.log_softmax(-1)
    p, t = logp.detach().exp(), teacher.exp()
    advantage = {"reverse": reverse_kl_advantage, "forward": forward_kl_advantage}[divergence]
    every_token = advantage(teacher[None], logp[None], torch.ones(1, V))[0]
    (-(p * every_token * logp)).sum().backward()
    gap = logp.detach() - teacher
    expected = {"reverse": p * (gap - (p * gap).sum()), "forward": p - t}[divergence]
    torch.testing.assert_close(logits.grad, expected, atol=1e-12, rtol=0)


def test_the_forward_advantage_has_mean_zero_under_the_student():
    logits, teacher = distributions()
    logp = logits.log_softmax(-1).detach()
    advantages = forward_kl_advantage(teacher[None], logp[None], torch.ones(1, V))[0]
    assert float((logp.exp() * advantages).sum()) == pytest.approx(0.0, abs=1e-12)


def test_sampled_advantages_carry_no_gradient_and_are_zero_outside_the_mask():
    student = torch.tensor([[math.nan, -1.0, -3.0]], requires_grad=True)
    teacher = torch.tensor([[math.nan, -2.0, -1.0]], requires_grad=True)
    mask = torch.tensor([[0, 1, 1]])
    reverse = reverse_kl_advantage(teacher, student, mask)
    forward = forward_kl_advantage(teacher, student, mask)
    assert not reverse.requires_grad
    assert not forward.requires_grad
    torch.testing.assert_close(reverse, torch.tensor([[0.0, -1.0, 2.0]]))
    expected = torch.tensor([[0.0, math.exp(-1) - 1, math.exp(2) - 1]])
    torch.testing.assert_close(forward, expected)


@pytest.mark.parametrize("name", ["teacher_reverse_kl", "teacher_forward_kl"])
def test_batch_keys_reach_the_sampled_form(name):
    rows = {"prox_logprobs": torch.full((2, 3), -1.0), "teacher_logprobs": torch.full((2, 3), -0.5)}
    # Rewards, and rows that are one trajectory, do not matter to it.
    batch = make_batch([1.0, 1.0], [0, 0], [1, 2], sample_ids=torch.tensor([7, 7]), **rows)
    out, _ = assign_advantages(batch, name)
    value = {"teacher_reverse_kl": 0.5, "teacher_forward_kl": math.exp(0.5) - 1}[name]
    torch.testing.assert_close(out["advantages"], value * batch["loss_mask"].float())
    with pytest.raises(DataError, match=f"teacher_logprobs: missing.*{name}"):
        assign_advantages(batch.exclude("teacher_logprobs"), name)


def test_the_estimator_none_gives_zero_to_all():
    out, metrics = assign_advantages(make_batch([1.0, 0.0], [0, 0], [1, 2]), "none")
    assert not out["advantages"].any()
    assert metrics["frac_reward_zero_std"] == 0


@pytest.mark.parametrize("divergence", sorted(DIVERGENCES))
def test_all_tokens_given_is_the_divergence_of_the_whole_vocabulary(divergence):
    logits, teacher = distributions()
    logp = logits.log_softmax(-1)
    p, t = logp.detach().exp(), teacher.exp()
    m = (p + t) / 2
    expected = {
        "forward": (t * (teacher - p.log())).sum(),
        "reverse": (p * (p.log() - teacher)).sum(),
        "jsd": ((t * (t / m).log()).sum() + (p * (p / m).log()).sum()) / 2,
    }[divergence]
    gradient = {
        "forward": p - t,
        "reverse": p * ((p / t).log() - expected),
        "jsd": 0.5 * p * ((p / m).log() - (p * (p / m).log()).sum()),
    }[divergence]
    found = topk_divergence(
        logp[None, None], teacher[None, None], torch.ones(1, 1), divergence=divergence
    )
    assert found.item() == pytest.approx(float(expected), abs=1e-12)
    found.sum().backward()
    torch.testing.assert_close(logits.grad, gradient, atol=1e-10, rtol=0)


def test_tokens_that_are_not_given_count_as_one():
    """Three tokens and the other three together: closed form of value and gradient."""
    logits, teacher = distributions()
    logp = logits.log_softmax(-1)
    p, t = logp.detach().exp(), teacher.exp()
    found = topk_divergence(
        logp[None, None, :3], teacher[None, None, :3], torch.ones(1, 1), divergence="forward"
    )
    rest_p, rest_t = p[3:].sum(), t[3:].sum()
    expected = (t[:3] * (t[:3] / p[:3]).log()).sum() + rest_t * (rest_t / rest_p).log()
    assert found.item() == pytest.approx(float(expected), abs=1e-12)
    found.sum().backward()
    gradient = p - torch.cat([t[:3], rest_t * p[3:] / rest_p])
    torch.testing.assert_close(logits.grad, gradient, atol=1e-12, rtol=0)
    whole = (t * (teacher - p.log())).sum()
    assert 0 < found.item() < float(whole)


@pytest.mark.parametrize("divergence", sorted(DIVERGENCES))
def test_no_gradient_to_the_teacher_and_none_outside_the_mask(divergence):
    student = torch.full((1, 3, 2), -1.5, requires_grad=True)
    teacher = torch.full((1, 3, 2), -2.0, requires_grad=True)
    with torch.no_grad():
        student[0, 0], teacher[0, 0] = math.nan, math.nan
        student[0, 2], teacher[0, 2] = 0.0, 0.0  # padding: no distribution at all
    mask = torch.tensor([[0, 1, 0]])
    found = topk_divergence(student, teacher, mask, divergence=divergence)
    assert found[0, 0] == found[0, 2] == 0
    found.sum().backward()
    assert teacher.grad is None
    assert student.grad[0, 1].abs().min() > 0
    assert not student.grad[0, 0].any()
    assert not student.grad[0, 2].any()


@pytest.mark.parametrize("divergence", sorted(DIVERGENCES))
def test_equal_distributions_are_a_minimum(divergence):
    logits, _ = distributions()
    logp = logits.log_softmax(-1)
    found = topk_divergence(
        logp[None, None, :4], logp.detach()[None, None, :4], torch.ones(1, 1), divergence=divergence
    )
    found.sum().backward()
    assert found.item() == pytest.approx(0.0, abs=1e-12)
    torch.testing.assert_close(logits.grad, torch.zeros(V, dtype=torch.float64), atol=1e-12, rtol=0)


def test_a_rest_lost_in_rounding_is_finite():
    sure = torch.tensor([[[0.0, -40.0]]], requires_grad=True)
    found = topk_divergence(sure, torch.tensor([[[-40.0, 0.0]]]), torch.ones(1, 1))
    assert found.item() == pytest.approx(40.0, abs=1e-3)
    found.sum().backward()
    assert sure.grad.isfinite().all()


def test_what_does_not_fit_is_refused():
    ones = torch.full((1, 1, 2), -1.0)
    with pytest.raises(ConfigError, match="divergence: got 'both', allowed: forward"):
        topk_divergence(ones, ones, torch.ones(1, 1), divergence="both")
    with pytest.raises(DataError, match="teacher_logprobs: got shape"):
        topk_divergence(ones, ones[..., :1], torch.ones(1, 1))
