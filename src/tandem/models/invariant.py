"""Attention in which a token's result does not depend on what shares the call with it.

Plain matrix products in fixed blocks: packed training, prefill and decoding then give the same bits
in fp32 on CPU. Fused kernels choose their blocks by shape and do not. Which keys a query may see is
decided by the contexts in ``packed`` and ``cache``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

ROWS = 16
"""Matrix products of at least this many rows give every row the same bits."""
KEY_MULTIPLE = 16
"""Keys are padded to a multiple of this and hidden, so that sums run over whole vectors."""
KEY_BLOCK = 192
"""Keys that one product with the values sums up. More of them the library adds in parts whose sizes
depend on their number: from 192 on with AVX2, from 256 on with AVX-512."""
QUERY_BLOCK = 64
"""Queries of one causal product; smaller wastes less work above the diagonal."""


def is_supported(query: Tensor) -> bool:
    """Whether the functions here are invariant for such a query: full precision on CPU."""
    is_full = query.dtype in (torch.float32, torch.float64)
    return is_full and query.device.type == "cpu" and not torch.is_autocast_enabled("cpu")


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """``softmax(query key' + bias) value`` of scaled queries.

    ``query [..., R, D]``, ``R >= ROWS``; ``key``, ``value`` ``[..., K, D]``, K a multiple of
    ``KEY_MULTIPLE``; ``bias`` broadcasts to ``[..., R, K]``, -inf where a key is hidden.
    """
    weights = torch.softmax((query @ key.transpose(-1, -2)).add_(bias), dim=-1)
    out = weights[..., :KEY_BLOCK] @ value[..., :KEY_BLOCK, :]
    for start in range(KEY_BLOCK, value.shape[-2], KEY_BLOCK):
        block = slice(start, start + KEY_BLOCK)
        out += weights[..., block] @ value[..., block, :]
    return out


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, *, scaling: float
) -> Tensor:
    """One query a sequence: ``query [n, heads, D]`` over keys ``[n, kv_heads, K, D]``.

    ``bias`` broadcasts to ``[n, kv_heads, 1, K]``. Returns ``[n, heads, D]``.
    """
    n, heads, dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    rows = F.pad((query * scaling).view(n, kv_heads, group, dim), (0, 0, 0, max(0, ROWS - group)))
    return attend(rows, key, value, bias)[:, :, :group].reshape(n, heads, dim)


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None = None
) -> Tensor:
    """Causal attention of ``query [S, heads, W, D]`` over keys ``[S, kv_heads, W, D]``.

    ``window`` limits a query to that many keys, its own included. Differentiable; the backward pass
    is that of the fused kernel.
    """
    width = query.shape[2]
    if padding := -width % KEY_MULTIPLE:
        query, key, value = (F.pad(item, (0, 0, 0, padding)) for item in (query, key, value))
    out: Tensor = _Causal.apply(query, key, value, scaling, window)
    return out[:, :, :width]


def chunk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    start: int,
    *,
    scaling: float,
    window: int | None = None,
) -> Tensor:
    """Queries ``[heads, W, D]`` at positions from ``start`` on, over all keys ``[kv_heads, K, D]``
    of their sequence up to themselves; K has room for a multiple of ``KEY_MULTIPLE``.
    """
    heads, width, dim = query.shape
    kv_heads = key.shape[0]
    scaled = query * scaling
    out = torch.empty_like(scaled)
    for first in range(0, width, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, width)
        num_keys = -(-(start + last) // KEY_MULTIPLE) * KEY_MULTIPLE
        hidden = ~visible(range(start + first, start + last), num_keys, window, query.device)
        bias = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
        bias = bias.masked_fill_(hidden, float("-inf")).repeat(heads // kv_heads, 1)
        rows = scaled[:, first:last].reshape(kv_heads, -1, dim)
        count = rows.shape[1]
        if count < ROWS:
            rows = F.pad(rows, (0, 0, 0, ROWS - count))
            bias = F.pad(bias, (0, 0, 0, ROWS - count))
        block = attend(rows, key[:, :num_keys], value[:, :num_keys], bias)[:, :count]
        out[:, first:last] = block.reshape(heads, last - first, dim)
    return out


def fused_causal_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None = None
) -> Tensor:
    """The same by torch's kernels: for every device and dtype, not invariant."""
    width = query.shape[2]
    banded = window is not None and window < width
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=visible(range(width), width, window, query.device) if banded else None,
        is_causal=not banded,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scaling, ctx.window = scaling, window
        segments, heads, width, dim = query.shape
        kv_heads = key.shape[1]
        scaled = query * scaling
        out = torch.empty_like(scaled)
        for start in range(0, width, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, width)
            hidden = ~visible(range(start, stop), stop, window, query.device)
            bias = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
            bias = bias.masked_fill_(hidden, float("-inf")).repeat(heads // kv_heads, 1)
            rows = scaled[:, :, start:stop].reshape(segments, kv_heads, -1, dim)
            block = attend(rows, key[:, :, :stop], value[:, :, :stop], bias)
            out[:, :, start:stop] = block.view(segments, heads, -1, dim)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [item.detach().requires_grad_() for item in ctx.saved_tensors]
        with torch.enable_grad():
            out = fused_causal_attention(*inputs, scaling=ctx.scaling, window=ctx.window)
        return *torch.autograd.grad(out, inputs, grads[0]), None, None


def visible(rows: range, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Bool ``[rows, keys]``: whether the query at a position sees the key at a position."""
    queries = torch.arange(rows.start, rows.stop, device=device)
    distance = queries[:, None] - torch.arange(num_keys, device=device)
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)
