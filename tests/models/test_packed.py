import pytest
import torch

from tandem.errors import DataError
from tandem.models.packed import PackedContext


def tensors(n, heads=4, kv_heads=2, size=8):
    g = torch.Generator().manual_seed(n)
    make = lambda h: torch.randn(1, h, n, size, generator=g, dtype=torch.float64).requires_grad_()  # noqa: E731
    return make(heads), make(kv_heads), make(kv_heads)


def dense(query, key, value, lengths, scaling, window=None):
    """Attention with an explicit block-diagonal causal mask, written out."""
    n, repeats = query.shape[2], query.shape[1] // key.shape[1]
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    allowed = (segment[:, None] == segment[None, :]) & (i >= j)
    if window is not None:
        allowed &= i - j < window
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = (query @ key.transpose(-1, -2)) * scaling
    return scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ value


CASES = [
    [5],
    [3, 9, 5, 7],
    [1, 1, 1],
    [40, 3, 100, 37, 1, 33, 99, 64],
    [30, 22, 25, 33, 28] * 3,
]


@pytest.mark.parametrize("lengths", CASES)
@pytest.mark.parametrize("window", [None, 4])
def test_values_and_gradients_equal_dense_masked_attention(lengths, window):
    q, k, v = tensors(sum(lengths))
    ours = PackedContext(lengths).attend(0, q, k, v, scaling=0.3, sliding_window=window)
    theirs = dense(q, k, v, lengths, 0.3, window)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    weights = torch.linspace(-1, 1, ours.numel(), dtype=torch.float64).view_as(ours)
    mine = torch.autograd.grad((ours * weights).sum(), (q, k, v))
    other = torch.autograd.grad((theirs * weights).sum(), (q, k, v))
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_segment_depends_on_itself_only():
    lengths = [3, 3, 40, 2]
    q, k, v = (t.detach() for t in tensors(48))
    context = PackedContext(lengths)
    before = context.attend(0, q, k, v, scaling=1.0, sliding_window=None)
    changed = [t.clone() for t in (q, k, v)]
    for t in changed:
        t[:, :, :3] += 5.0
    after = context.attend(0, *changed, scaling=1.0, sliding_window=None)
    assert torch.equal(before[:, :, 3:], after[:, :, 3:])
    assert not torch.equal(before[:, :, :3], after[:, :, :3])


def test_many_short_segments_take_few_calls():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 31, (256,), generator=generator).tolist()
    assert len(PackedContext(lengths)._buckets) == 1
    mixed = torch.randint(1, 500, (256,), generator=generator).tolist()
    assert len(PackedContext(mixed)._buckets) < 16


def test_wrong_lengths_are_refused():
    with pytest.raises(DataError, match="positive"):
        PackedContext([3, 0])
    q, k, v = tensors(4)
    with pytest.raises(DataError, match="expected"):
        PackedContext([3]).attend(0, q, k, v, scaling=1.0, sliding_window=None)
