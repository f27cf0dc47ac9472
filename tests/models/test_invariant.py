"""Bits of attention: the same for packed training, prefill and decoding, whatever the batch."""

import pytest
import torch

from tandem.models.invariant import causal_attention, decode_attention, fused_causal_attention


def tensors(rows, heads, kv_heads, width, dim, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, h, width, dim, generator=g) for h in (heads, kv_heads, kv_heads)]


def written_out(query, key, value, scaling, window):
    group = query.shape[1] // key.shape[1]
    key, value = (item.repeat_interleave(group, 1) for item in (key, value))
    distance = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    scores = (query @ key.transpose(-1, -2) * scaling).masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("attention", [causal_attention, fused_causal_attention])
@pytest.mark.parametrize("width", [1, 15, 16, 70, 130])
@pytest.mark.parametrize("window", [None, 5])
def test_values_and_gradients_equal_attention_written_out(attention, width, window):
    inputs = [t.double().requires_grad_() for t in tensors(2, 6, 2, width, 8)]
    ours = attention(*inputs, scaling=0.3, window=window)
    theirs = written_out(*inputs, 0.3, window)
    torch.testing.assert_close(ours, theirs)
    grad = torch.randn(ours.shape, dtype=torch.float64)
    expected = torch.autograd.grad(theirs, inputs, grad)
    torch.testing.assert_close(torch.autograd.grad(ours, inputs, grad), expected)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (2, 2, 32), (8, 1, 16)])
@pytest.mark.parametrize("width", [5, 40, 257, 600])
@pytest.mark.parametrize("window", [None, 33])
def test_decoding_beside_others_has_the_bits_of_the_causal_pass(
    heads, kv_heads, dim, width, window
):
    query, key, value = tensors(1, heads, kv_heads, width, dim)
    causal = causal_attention(query, key, value, scaling=dim**-0.5, window=window)[0]
    for position in {0, width // 3, width - 1}:
        for others, spare in ((0, 0), (4, 64), (15, 300)):
            num_keys = -(-(position + 1 + spare) // 16) * 16
            rows, keys, values = tensors(others + 1, heads, kv_heads, num_keys, dim, seed=1)
            stored = min(width, num_keys)
            keys[0, :, :stored] = key[0, :, :stored]
            values[0, :, :stored] = value[0, :, :stored]
            rows = rows[:, :, 0]
            rows[0] = query[0, :, position]
            index = torch.arange(num_keys)
            hidden = (index > position) | (index <= position - (window or num_keys))
            bias = torch.zeros(num_keys).masked_fill_(hidden, float("-inf"))
            out = decode_attention(rows, keys, values, bias, scaling=dim**-0.5)
            assert torch.equal(out[0], causal[:, position])


def test_a_segment_has_the_same_bits_alone_and_among_longer_ones():
    query, key, value = tensors(3, 6, 2, 300, 16)
    together = causal_attention(query, key, value, scaling=0.25)
    for width in (7, 100, 299):
        alone = causal_attention(*(t[1:2, :, :width] for t in (query, key, value)), scaling=0.25)
        assert torch.equal(alone[0], together[1, :, :width])
