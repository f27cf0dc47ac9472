"""Attention of one packed forward pass over the rows of a cache.

The pass ``[1, N]`` begins with one token for each of the first rows (decoding) and goes on with
chunks of sequences whose keys and values are not yet complete (prefill).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tandem.models import invariant
from tandem.models.cache.rows import KVCache
from tandem.models.invariant import KEY_MULTIPLE


@dataclass(frozen=True, slots=True)
class ChunkGroup:
    """Tokens ``start`` to ``stop`` of each of ``rows``, packed row by row from token ``offset``."""

    offset: int
    start: int
    stop: int
    rows: tuple[int, ...]

    @property
    def width(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class RowCopy:
    """Rows ``targets`` take over the first ``count`` tokens of row ``source`` in this pass."""

    source: int
    targets: tuple[int, ...]
    count: int


class CacheContext:
    """``positions`` (int64, on the device) are those of the decoded rows' new tokens.

    The longest of them is ``max_position``. In every layer the keys and values of chunks are stored
    first, then ``copies`` are made in order, so that a chunk may follow on a prefix that this same
    pass computes for another row. Tokens after the last group are filler; their output is zero.

    Where ``invariant`` supports the dtype its attention is used, which has training's bits, unless
    ``is_fast`` asks for torch's fused kernels.

    What ``attend`` does for decoded rows reads sizes from ``shared`` tensors and the cache, so that
    a recording of it serves any number of rows and keys.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        positions: Tensor,
        max_position: int,
        groups: Sequence[ChunkGroup] = (),
        copies: Sequence[RowCopy] = (),
        is_fast: bool = False,
    ) -> None:
        self._cache = cache
        self._is_fast = is_fast
        self._positions = positions
        self._num_keys = -(-(max_position + 1) // KEY_MULTIPLE) * KEY_MULTIPLE
        self._groups = groups
        self._copies = copies
        self._rows = [torch.tensor(group.rows, device=positions.device) for group in groups]
        self._bands: dict[tuple[int, int, int | None], Tensor] = {}
        self._masks: dict[int | None, Tensor] = {}
        self._places: dict[int, Tensor] = {}

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
        keys, values = self._cache.layer(layer_idx, key, value, sliding_window)
        asked, dtype = query.dtype, keys.dtype
        query, key, value = (item.to(dtype) for item in (query, key, value))
        n = self._positions.shape[0]
        if n == query.shape[2]:
            out = self._decode(layer_idx, query, key, value, scaling, sliding_window)
            return out.to(asked)
        out = query.new_zeros(1, query.shape[1], query.shape[2], value.shape[3])
        if n:
            q, k, v = (item[:, :, :n] for item in (query, key, value))
            out[:, :, :n] = self._decode(layer_idx, q, k, v, scaling, sliding_window)
        self._store(keys, key)
        self._store(values, value)
        for group in self._groups:
            span = slice(group.offset, group.offset + group.width * len(group.rows))
            packed = [item[0, :, span] for item in (query, key, value)]
            if group.start == 0:
                out[0, :, span] = self._first_chunks(group, packed, scaling, sliding_window)
            else:
                out[0, :, span] = self._later_chunks(
                    group, packed[0], keys, values, scaling, sliding_window
                )
        return out.to(asked)

    def _store(self, stored: Tensor, new: Tensor) -> None:
        """Keep the keys or values of all chunks, then let other rows take them over."""
        for group, rows in zip(self._groups, self._rows, strict=True):
            span = slice(group.offset, group.offset + group.width * len(group.rows))
            chunks = new[0, :, span].unflatten(1, (len(group.rows), group.width))
            stored[rows, :, group.start : group.stop] = chunks.transpose(0, 1)
        for copy in self._copies:
            given = stored[copy.source, :, : copy.count].clone()
            stored[list(copy.targets), :, : copy.count] = given

    def _decode(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        """One new token ``[1, heads, n, D]`` of each of the first rows. Few operations: for small
        models their number is what a step costs."""
        keys, values = self._cache.stored(layer_idx)
        place, mask = self._place(layer_idx), self._decode_mask(query.dtype, window)
        for stored, new in ((keys, key), (values, value)):
            width = new.shape[3]
            stored.view(-1, width).index_copy_(0, place, new.transpose(1, 2).reshape(-1, width))
        n, num_keys = query.shape[2], mask.shape[-1]
        attention = fused_decode_attention if self._is_fused(query) else invariant.decode_attention
        out = attention(
            query.transpose(1, 2)[0],
            keys[:n, :, :num_keys],
            values[:n, :, :num_keys],
            mask,
            scaling=scaling,
        )
        return out.transpose(0, 1)[None]

    def _is_fused(self, query: Tensor) -> bool:
        return self._is_fast or not invariant.is_supported(query)

    def _place(self, layer_idx: int) -> Tensor:
        """Of every (decoded row, head): its new token among all ``rows * heads * length``."""
        heads, length = self._cache.num_heads[layer_idx], self._cache.shape[1]
        if heads not in self._places:
            count = self._positions.shape[0]
            first = torch.arange(count * heads, device=self._positions.device) * length
            self._places[heads] = first + self._positions.repeat_interleave(heads)
        return self._places[heads]

    def _decode_mask(self, dtype: torch.dtype, window: int | None) -> Tensor:
        if window not in self._masks:
            index = torch.arange(self._num_keys, device=self._positions.device)
            hidden = index > self._positions[:, None]
            if window is not None:
                hidden |= index <= self._positions[:, None] - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._masks[window] = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        return self._masks[window]

    def shared(self) -> list[Tensor]:
        """All that the layers of a decoding pass read beside their own tensors and the cache."""
        for layer_idx in self._cache.num_heads:
            self._place(layer_idx)
        dtype = next(iter(self._cache.stores()[0].values())).dtype
        for window in self._cache.windows:
            self._decode_mask(dtype, window)
        return [self._positions, *self._places.values(), *self._masks.values()]

    def _first_chunks(
        self, group: ChunkGroup, packed: Sequence[Tensor], scaling: float, window: int | None
    ) -> Tensor:
        """Chunks from token 0 on see themselves only; all rows of the group in one call."""
        query, key, value = (
            item.unflatten(1, (len(group.rows), group.width)).transpose(0, 1) for item in packed
        )
        fused = self._is_fused(query)
        attention = invariant.fused_causal_attention if fused else invariant.causal_attention
        out = attention(query, key, value, scaling=scaling, window=window)
        return out.transpose(0, 1).flatten(1, 2)

    def _later_chunks(
        self,
        group: ChunkGroup,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        """Chunks that follow on cached tokens, row by row so that nothing is gathered."""
        if self._is_fused(query):
            mask = self._visible(group.start, group.stop, window)
            outs = [
                scaled_dot_product_attention(
                    part[None],
                    keys[row : row + 1, :, : group.stop],
                    values[row : row + 1, :, : group.stop],
                    attn_mask=mask,
                    scale=scaling,
                    enable_gqa=True,
                )[0]
                for row, part in zip(group.rows, query.split(group.width, dim=1), strict=True)
            ]
        else:
            outs = [
                invariant.chunk_attention(
                    part, keys[row], values[row], group.start, scaling=scaling, window=window
                )
                for row, part in zip(group.rows, query.split(group.width, dim=1), strict=True)
            ]
        return torch.cat(outs, dim=1)

    def _visible(self, start: int, stop: int, window: int | None) -> Tensor:
        name = (start, stop, window)
        if name not in self._bands:
            device = self._positions.device
            self._bands[name] = invariant.visible(range(start, stop), stop, window, device)
        return self._bands[name]


def fused_decode_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, *, scaling: float
) -> Tensor:
    """The same as ``invariant.decode_attention`` by torch's kernel: faster, not invariant.

    The query heads that share a key head stand where the kernel expects query positions, so keys
    and values are read once for all of them.
    """
    n, heads, dim = query.shape
    grouped = query.reshape(n, key.shape[1], -1, dim)
    mask = bias.expand(n, 1, grouped.shape[2], key.shape[2])
    out = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(n, heads, value.shape[3])
