"""The critic's loss: closed-form gradient, where none may flow, and the explained variance."""

import math

import pytest
import torch
from tensordict import TensorDict

from tandem.algorithms.value import ValueObjective, explained_variance, value_loss
from tandem.errors import ConfigError

NAN = math.nan


def test_gradient_is_the_error_and_zero_where_the_clip_holds():
    # Old value 0 and clip 0.2: inside; outside but the plain error is larger; outside and clipped.
    values = torch.tensor([[0.1, -0.5, 0.5, NAN]], requires_grad=True)
    returns = torch.tensor([[1.0, 1.0, 1.0, NAN]])
    mask = torch.tensor([[1, 1, 1, 0]])
    loss, stats = value_loss(values, torch.zeros(1, 4), returns, mask, clip=0.2)
    torch.testing.assert_close(loss, torch.tensor([[0.405, 1.125, 0.32, 0.0]]))
    assert stats["vf_clipfrac"].tolist() == [[False, False, True, False]]
    loss.sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([[-0.9, -1.5, 0.0, 0.0]]))


def test_returns_and_old_values_get_no_gradient():
    values, old, returns = (torch.ones(1, 2, requires_grad=True) for _ in range(3))
    loss, _ = value_loss(values * 2, old, returns, torch.ones(1, 2), clip=None)
    loss.sum().backward()
    assert values.grad is not None
    assert old.grad is None
    assert returns.grad is None


def test_a_clip_must_be_positive():
    with pytest.raises(ConfigError, match="clip: got 0"):
        value_loss(*(torch.ones(1, 1),) * 4, clip=0)


def test_the_objective_sums_weighted_losses():
    batch = TensorDict(
        {
            "loss_mask": torch.tensor([[False, True, True]]),
            "values": torch.zeros(1, 3),
            "returns": torch.tensor([[9.0, 1.0, 3.0]]),
            "value_loss_weights": torch.tensor([[0.0, 0.5, 0.25]]),
        },
        batch_size=[1],
    )
    loss, metrics = ValueObjective()({"values": torch.tensor([[7.0, 2.0, 1.0]])}, batch)
    assert loss.item() == pytest.approx(0.5 * 0.5 * 1 + 0.25 * 0.5 * 4)
    assert float(metrics["critic/value_mean"].value) == 1.5


def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_a_constant_one():
    returns = torch.tensor([[NAN, 1.0, 2.0, 3.0]])
    mask = torch.tensor([[0, 1, 1, 1]])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(torch.full((1, 4), 5.0), returns, mask) == pytest.approx(0.0)
    # Errors 0, 1, -1: variance 2/3, that of the returns too.
    off = torch.tensor([[0.0, 1.0, 1.0, 4.0]])
    assert explained_variance(off, returns, mask) == pytest.approx(0.0)
    assert explained_variance(off, torch.ones(1, 4), mask) is None
