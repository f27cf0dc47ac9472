import math

import pytest
import torch

from tandem.algorithms.tokens import (
    logprobs_and_entropy,
    masked_mean,
    masked_var,
    masked_whiten,
    under_mask,
)
from tandem.errors import ConfigError

NAN = float("nan")


def test_whitening_takes_both_moments_over_the_mask():
    x = torch.tensor([[2.0, 4.0, 0.0, 0.0], [6.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    root = math.sqrt(1.5)
    expected = torch.tensor([[-root, 0, 0, 0], [root, 0, 0, 0]])
    torch.testing.assert_close(masked_whiten(x, mask, ddof=0), expected, atol=1e-6, rtol=0)


def test_nan_outside_the_mask_reaches_neither_value_nor_gradient():
    x = torch.tensor([1.0, NAN, 3.0], requires_grad=True)
    mask = torch.tensor([True, False, True])
    assert masked_mean(x, mask).item() == 2.0
    assert masked_var(x, mask).item() == 2.0
    whitened = masked_whiten(x, mask)
    assert whitened.isfinite().all()
    (grad,) = torch.autograd.grad(under_mask(x, mask).exp().sum(), x)
    assert grad[1] == 0.0


@pytest.mark.parametrize("function", [masked_mean, masked_var])
def test_empty_mask_gives_zero(function):
    assert function(torch.tensor([NAN, 1.0]), torch.zeros(2)).item() == 0.0


def test_constant_values_whiten_to_exactly_zero_also_with_rounding():
    x = torch.tensor([0.1, 0.2, 0.3]).sum().expand(7) + 0.1
    assert masked_whiten(x, torch.ones(7)).eq(0).all()
    kept = masked_whiten(x, torch.ones(7), shift_mean=False)
    torch.testing.assert_close(kept, x)


def test_large_mean_does_not_cancel_the_variance():
    x = torch.tensor([10_000.0, 10_001.0, 10_002.0])
    assert masked_var(x, torch.ones(3)).item() == pytest.approx(1.0, rel=1e-6)


def test_one_value_has_no_unbiased_variance():
    assert masked_var(torch.tensor([5.0]), torch.ones(1), ddof=1).item() == 0.0


def test_unknown_whitening_form_is_refused():
    with pytest.raises(ConfigError, match=r"form: got 'std'"):
        masked_whiten(torch.ones(2), torch.ones(2), form="std")
    with pytest.raises(ConfigError, match="ddof: got 2"):
        masked_var(torch.ones(2), torch.ones(2), ddof=2)


def test_logprobs_divide_by_the_row_temperature():
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]])
    logprobs, _ = logprobs_and_entropy(logits, torch.tensor([0, 0]), torch.tensor([0.6, 1.0]))
    torch.testing.assert_close(logprobs, torch.tensor([-3.535906, -2.407606]), atol=1e-6, rtol=0)


def test_forbidden_tokens_have_finite_gradients():
    logits = torch.tensor([[1.0, -torch.inf, 0.0]], requires_grad=True)
    logprobs, entropy = logprobs_and_entropy(logits, torch.tensor([0]))
    (grad,) = torch.autograd.grad((logprobs + entropy).sum(), logits)
    assert grad.isfinite().all()
    assert grad[0, 1] == 0.0
