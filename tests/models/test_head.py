import math

import pytest
import torch

from tandem.models.head import candidate_logprobs, token_logprobs
from tests.memory import peak_bytes


def plain(hidden, weight, targets, temperature, bias=None):
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    log_probs = (logits / temperature[:, None]).log_softmax(-1)
    chosen = log_probs.gather(1, targets[:, None])[:, 0]
    return chosen, -(log_probs.exp() * log_probs).sum(-1)


def case(n=40, vocabulary=101, size=16, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, size, generator=g, dtype=dtype).requires_grad_()
    weight = torch.randn(vocabulary, size, generator=g, dtype=dtype).mul(0.5).requires_grad_()
    targets = torch.randint(vocabulary, (n,), generator=g)
    temperature = torch.rand(n, generator=g, dtype=dtype) + 0.5
    return hidden, weight, targets, temperature


@pytest.mark.parametrize("chunk", [1, 7, 39, 40, 1000])
def test_values_and_gradients_equal_plain_log_softmax(chunk):
    hidden, weight, targets, temperature = case(dtype=torch.float64)
    coefficients = torch.linspace(-1, 1, 40, dtype=torch.float64)
    ours = token_logprobs(hidden, weight, targets, temperature, with_entropy=True, chunk=chunk)
    theirs = plain(hidden, weight, targets, temperature)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
    losses = [
        (logprob * coefficients).sum() + (entropy * coefficients.square()).sum()
        for logprob, entropy in (ours, theirs)
    ]
    for mine, other in zip(
        *(torch.autograd.grad(loss, (hidden, weight)) for loss in losses), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-11)


def test_fp32_is_within_1e_5():
    hidden, weight, targets, temperature = case(vocabulary=5000)
    ours = token_logprobs(hidden, weight, targets, temperature, with_entropy=True, chunk=3)
    double = [t.double() if t.is_floating_point() else t for t in case(vocabulary=5000)]
    exact = plain(*double)
    for mine, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("has_tiles", "tolerance"), [(False, 1e-5), (True, 3e-2)])
@pytest.mark.parametrize("chunk", [3, 1000])
def test_bf16_rounds_the_weight_and_gives_gradients_to_its_fp32_master(
    monkeypatch, has_tiles, tolerance, chunk
):
    """Without tiles nothing else is rounded but the gradient of the bf16 hidden states."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_tiles)
    hidden, weight, targets, temperature = case(vocabulary=700)
    halved = hidden.detach().bfloat16().requires_grad_()
    ours = token_logprobs(halved, weight, targets, temperature, with_entropy=True, chunk=chunk)
    exact = [t.detach().bfloat16().double().requires_grad_() for t in (hidden, weight)]
    theirs = plain(*exact, targets, temperature.double())
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), other, rtol=0, atol=tolerance)
    (ours[0].sum() + ours[1].sum()).backward()
    (theirs[0].sum() + theirs[1].sum()).backward()
    assert (halved.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(weight.grad.double(), exact[1].grad, rtol=0, atol=10 * tolerance)
    torch.testing.assert_close(halved.grad.double(), exact[0].grad, rtol=2**-8, atol=10 * tolerance)


def test_bias_takes_part():
    hidden, weight, targets, temperature = case(dtype=torch.float64)
    bias = torch.linspace(-2, 2, 101, dtype=torch.float64).requires_grad_()
    ours, _ = token_logprobs(
        hidden, weight, targets, temperature, with_entropy=False, chunk=5, bias_V=bias
    )
    theirs, _ = plain(hidden, weight, targets, temperature, bias)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    (mine,) = torch.autograd.grad(ours.sum(), bias)
    (other,) = torch.autograd.grad(theirs.sum(), bias)
    torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


def from_logits(logits, target, temperature, chunk):
    """Hidden states that are the logits, projected by the identity."""
    logits = torch.tensor([logits], requires_grad=True)
    weight = torch.eye(logits.shape[1])
    return logits, token_logprobs(
        logits,
        weight,
        torch.tensor([target]),
        torch.tensor([temperature]),
        with_entropy=True,
        chunk=chunk,
    )


def test_temperature_divides_the_logits():
    _, (logprob, _) = from_logits([0.0, 1.0, 2.0], 0, 0.6, 1)
    assert logprob.item() == pytest.approx(-3.535906, abs=1e-5)


def test_large_logits_stay_finite():
    _, (logprob, entropy) = from_logits([1000.0, 999.0, 0.0, -1000.0], 1, 1.0, 1)
    assert logprob.item() == pytest.approx(-1.3132616875, abs=1e-5)
    assert entropy.item() == pytest.approx(0.5822031088, abs=1e-5)


def test_entropy_gradient_in_closed_form():
    logits, (_, entropy) = from_logits([0.0, 1.0, 2.0], 0, 1.0, 1)
    (grad,) = torch.autograd.grad(entropy.sum(), logits)
    # dH/dz_j = -p_j (log p_j + H)
    expected = [0.1418170936, 0.1407703575, -0.2825874511]
    assert grad[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_an_unused_entropy_changes_no_gradient():
    hidden, weight, targets, temperature = case()
    for with_entropy in (False, True):
        logprobs, _ = token_logprobs(
            hidden, weight, targets, temperature, with_entropy=with_entropy, chunk=7
        )
        logprobs.sum().backward()
    # The second backward added exactly the same once more.
    twice, _ = plain(hidden, weight, targets, temperature)
    (expected,) = torch.autograd.grad(twice.sum(), hidden)
    torch.testing.assert_close(hidden.grad, 2 * expected, rtol=0, atol=1e-5)


def test_no_rows_is_no_rows():
    hidden, weight, targets, temperature = case(n=0)
    logprobs, _ = token_logprobs(hidden, weight, targets, temperature, with_entropy=True, chunk=4)
    assert logprobs.shape == (0,)
    logprobs.sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_peak_memory_follows_the_chunk_forward_and_backward():
    hidden, weight, targets, temperature = case(n=2048, vocabulary=32768, size=64)

    def step():
        logprobs, _ = token_logprobs(
            hidden, weight, targets, temperature, with_entropy=False, chunk=128
        )
        logprobs.sum().backward()

    full = 2048 * 32768 * 4
    assert peak_bytes(step) < full / 4
    rows = slice(0, 2048, 256)
    logprobs, _ = token_logprobs(
        hidden, weight, targets, temperature, with_entropy=False, chunk=128
    )
    expected, _ = plain(hidden[rows], weight, targets[rows], temperature[rows])
    torch.testing.assert_close(logprobs[rows], expected, rtol=0, atol=1e-5)
    assert math.isfinite(float(hidden.grad.sum()))


@pytest.mark.parametrize("chunk", [7, 40])
def test_candidates_have_the_log_probabilities_and_gradients_of_plain_log_softmax(chunk):
    hidden, weight, targets, temperature = case(dtype=torch.float64)
    bias = torch.linspace(-2, 2, 101, dtype=torch.float64).requires_grad_()
    candidates = torch.randint(101, (40, 3), generator=torch.Generator().manual_seed(3))
    logprobs, _ = token_logprobs(
        hidden, weight, targets, temperature, with_entropy=False, chunk=5, bias_V=bias
    )
    ours = candidate_logprobs(
        hidden, weight, targets, logprobs, candidates, temperature, bias_V=bias, chunk=chunk
    )
    logits = (hidden @ weight.T + bias) / temperature[:, None]
    theirs = logits.log_softmax(-1).gather(1, candidates)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    coefficients = torch.linspace(-1, 1, 120, dtype=torch.float64).view(40, 3)
    for mine, other in zip(
        *(
            torch.autograd.grad((found * coefficients).sum(), (hidden, weight, bias))
            for found in (ours, theirs)
        ),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-11)
