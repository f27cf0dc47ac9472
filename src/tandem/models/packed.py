"""Attention over a packed sequence: every segment sees itself only.

How rows are packed is decided in ``data/packing``; key/value caches belong to generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem.errors import DataError
from tandem.models.invariant import causal_attention, fused_causal_attention, is_supported

SHORT_SEGMENT = 32
"""Segments up to this length share one bucket: padding them costs less than another call."""


class PackedContext:
    """Causal attention within each of the segments ``lengths`` of a ``[1, N]`` sequence.

    Segments of similar length run in one call, padded on the right: a causal query never sees the
    padding after it, so no mask is needed and no segment sees another.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        if not lengths or min(lengths) < 1:
            raise DataError(f"lengths: got {list(lengths)}, allowed: one or more positive integers")
        self.num_tokens = sum(lengths)
        self._buckets = _buckets(lengths)
        self._index: dict[torch.device, _Index] = {}

    def attend(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
    ) -> Tensor:
        """Attention of one layer; shapes as in ``AttentionContext``."""
        if query.shape[0] != 1 or query.shape[2] != self.num_tokens:
            raise DataError(
                f"packed attention: expected [1, heads, {self.num_tokens}, D], "
                f"received {tuple(query.shape)}"
            )
        if self._is_one_segment:
            return _causal(query, key, value, scaling, sliding_window)
        index = self._index_on(query.device)
        padded = [_to_buckets(tensor, index) for tensor in (query, key, value)]
        outputs = []
        for bucket in self._buckets:
            q, k, v = (
                tensor[bucket.start : bucket.stop]
                .view(bucket.rows, bucket.width, *tensor.shape[1:])
                .transpose(1, 2)
                for tensor in padded
            )
            out = _causal(q, k, v, scaling, sliding_window)
            outputs.append(out.transpose(1, 2).reshape(-1, *out.shape[1::2]))
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        tokens = _Permute.apply(joined, index.slot_of_token, index.token_of_slot, index.is_padding)
        return tokens.transpose(0, 1)[None]

    @property
    def _is_one_segment(self) -> bool:
        return len(self._buckets) == 1 and self._buckets[0].rows == 1

    def _index_on(self, device: torch.device) -> _Index:
        if device not in self._index:
            self._index[device] = _make_index(self._buckets, self.num_tokens, device)
        return self._index[device]


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Segments ``(offset in the packed sequence, length)`` that run padded to ``width``."""

    segments: tuple[tuple[int, int], ...]
    width: int
    start: int

    @property
    def rows(self) -> int:
        return len(self.segments)

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.width


@dataclass(frozen=True, slots=True)
class _Index:
    """Token of every bucket slot (padding: its segment's last token), slot of every token."""

    token_of_slot: Tensor
    slot_of_token: Tensor
    is_padding: Tensor | None


def _buckets(lengths: Sequence[int]) -> list[_Bucket]:
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    buckets: list[_Bucket] = []
    members: list[tuple[int, int]] = []
    width = start = 0
    for i in order:
        fits = lengths[i] >= 0.75 * width or width <= SHORT_SEGMENT
        if members and not fits:
            buckets.append(_Bucket(tuple(members), width, start))
            start, members = buckets[-1].stop, []
        width = width if members else lengths[i]
        members.append((offsets[i], lengths[i]))
    return [*buckets, _Bucket(tuple(members), width, start)]


def _make_index(buckets: Sequence[_Bucket], num_tokens: int, device: torch.device) -> _Index:
    slots, padding = [], []
    for bucket in buckets:
        offsets = torch.tensor([offset for offset, _ in bucket.segments])
        lengths = torch.tensor([length for _, length in bucket.segments])
        steps = torch.arange(bucket.width)
        slots.append((offsets[:, None] + steps.clamp(max=lengths[:, None] - 1)).flatten())
        padding.append((steps >= lengths[:, None]).flatten())
    token_of_slot, is_padding = torch.cat(slots), torch.cat(padding)
    real = (~is_padding).nonzero().squeeze(-1)
    slot_of_token = torch.empty(num_tokens, dtype=torch.int64)
    slot_of_token[token_of_slot[real]] = real
    return _Index(
        token_of_slot.to(device),
        slot_of_token.to(device),
        is_padding.nonzero().squeeze(-1).to(device) if bool(is_padding.any()) else None,
    )


def _to_buckets(tensor: Tensor, index: _Index) -> Tensor:
    """``[1, heads, N, D]`` to ``[slots, heads, D]``."""
    tokens = tensor[0].transpose(0, 1)
    return _Permute.apply(tokens, index.token_of_slot, index.slot_of_token, None)


class _Permute(torch.autograd.Function):
    """``x[forward]`` whose gradient is ``grad[backward]``, zero at ``zeroed``.

    The plain backward of indexing adds up row by row; here every row has one origin, because
    padding slots receive no gradient, so a gather does.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Tensor, backward: Tensor, zeroed: Any) -> Tensor:
        ctx.backward_index, ctx.zeroed = backward, zeroed
        return x.index_select(0, forward)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        grad = grads[0].index_select(0, ctx.backward_index)
        if ctx.zeroed is not None:
            grad.index_fill_(0, ctx.zeroed, 0)
        return grad, None, None, None


def _causal(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding_window: int | None
) -> Tensor:
    attention = causal_attention if is_supported(query) else fused_causal_attention
    return attention(query, key, value, scaling=scaling, window=sliding_window)
