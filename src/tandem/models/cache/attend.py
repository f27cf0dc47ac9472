"""Attention of one packed forward pass over the rows of a cache.

The pass ``[1, N]`` begins with one token for each of the first rows (decoding) and goes on with
chunks of sequences whose keys and values are not yet complete (prefill).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tandem.models import invariant
from tandem.models.cache.decoded import DecodedRows
from tandem.models.cache.rows import Int64s, KVCache, Shelf

_NO_POSITIONS: Int64s = np.zeros(0, dtype=np.int64)


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

    @property
    def span(self) -> slice:
        """Its tokens in the packed sequence."""
        return slice(self.offset, self.offset + self.width * len(self.rows))


@dataclass(frozen=True, slots=True)
class RowCopy:
    """Rows ``targets`` take over the first ``count`` tokens of row ``source`` in this pass."""

    source: int
    targets: tuple[int, ...]
    count: int


class CacheContext:
    """``positions`` are those of the new tokens of the first rows, which are decoded.

    In every layer the keys and values of chunks are stored first, then ``copies`` are made in
    order, so that a chunk may follow on a prefix that this same pass computes for another row.
    Tokens after the last group are filler; their output is zero.

    Where ``invariant`` supports the dtype its attention is used, which has training's bits, unless
    ``is_fast`` asks for torch's fused kernels.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        positions: Int64s = _NO_POSITIONS,
        groups: Sequence[ChunkGroup] = (),
        copies: Sequence[RowCopy] = (),
        is_fast: bool = False,
    ) -> None:
        self._cache = cache
        self._is_fast = is_fast
        self.decoded = DecodedRows(cache, positions, is_fast=is_fast)
        self._groups = groups
        self._copies = copies
        self._lying = [_by_shelf(cache, group.rows) for group in groups]
        self._taking = [_by_shelf(cache, copy.targets) for copy in copies]
        self._bands: dict[tuple[int, int, int | None], Tensor] = {}

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
        self._cache.see(layer_idx, key, value, sliding_window)
        asked, dtype = query.dtype, self._cache.dtype
        query, key, value = (item.to(dtype) for item in (query, key, value))
        n = self.decoded.count(query.device)
        decode = partial(self.decoded.attend, layer_idx, scaling=scaling, window=sliding_window)
        if n == query.shape[2]:
            return decode(query, key, value).to(asked)
        out = query.new_zeros(1, query.shape[1], query.shape[2], value.shape[3])
        if n:
            out[:, :, :n] = decode(*(item[:, :, :n] for item in (query, key, value)))
        for group, lying in zip(self._groups, self._lying, strict=True):
            self._store(layer_idx, group, lying, key, value)
        for copy, taking in zip(self._copies, self._taking, strict=True):
            self._take_over(layer_idx, copy, taking)
        for group in self._groups:
            span = group.span
            if group.start == 0:
                packed = [item[0, :, span] for item in (query, key, value)]
                out[0, :, span] = self._first_chunks(group, packed, scaling, sliding_window)
            else:
                out[0, :, span] = self._later_chunks(
                    group, layer_idx, query[0, :, span], scaling, sliding_window
                )
        return out.to(asked)

    def _store(
        self, layer_idx: int, group: ChunkGroup, lying: Sequence[_Part], key: Tensor, value: Tensor
    ) -> None:
        """Keep the keys and values of chunks."""
        for shelf, which, slots in lying:
            for store, new in ((shelf.keys, key), (shelf.values, value)):
                chunks = new[0, :, group.span].unflatten(1, (len(group.rows), group.width))
                store[layer_idx][slots, :, group.start : group.stop] = chunks.transpose(0, 1)[which]

    def _take_over(self, layer_idx: int, copy: RowCopy, taking: Sequence[_Part]) -> None:
        """Let rows have the beginning of another."""
        source, slot = self._cache.locate(copy.source)
        for store in ("keys", "values"):
            given = getattr(source, store)[layer_idx][slot, :, : copy.count].clone()
            for shelf, _, slots in taking:
                getattr(shelf, store)[layer_idx][slots, :, : copy.count] = given

    def _is_fused(self, query: Tensor) -> bool:
        return self._is_fast or not invariant.is_supported(query)

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
        layer_idx: int,
        query: Tensor,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        """Chunks that follow on cached tokens, row by row so that nothing is gathered."""
        outs = []
        for row, part in zip(group.rows, query.split(group.width, dim=1), strict=True):
            shelf, slot = self._cache.locate(row)
            keys, values = shelf.keys[layer_idx][slot], shelf.values[layer_idx][slot]
            if self._is_fused(query):
                out = scaled_dot_product_attention(
                    part[None],
                    keys[None, :, : group.stop],
                    values[None, :, : group.stop],
                    attn_mask=self._visible(group.start, group.stop, window, query.device),
                    scale=scaling,
                    enable_gqa=True,
                )[0]
            else:
                out = invariant.chunk_attention(
                    part, keys, values, group.start, scaling=scaling, window=window
                )
            outs.append(out)
        return torch.cat(outs, dim=1)

    def _visible(self, start: int, stop: int, window: int | None, device: torch.device) -> Tensor:
        name = (start, stop, window)
        if name not in self._bands:
            self._bands[name] = invariant.visible(range(start, stop), stop, window, device)
        return self._bands[name]


_Part = tuple[Shelf, list[int] | slice, list[int]]
"""Of some rows: a shelf, which of them lie there, and in which slots."""


def _by_shelf(cache: KVCache, rows: Sequence[int]) -> list[_Part]:
    places = [cache.locate(row) for row in rows]
    shelves = {shelf.length: shelf for shelf, _ in places}
    if len(shelves) == 1:
        return [(places[0][0], slice(None), [slot for _, slot in places])]
    found: list[_Part] = []
    for shelf in shelves.values():
        which = [index for index, place in enumerate(places) if place[0] is shelf]
        found.append((shelf, which, [places[index][1] for index in which]))
    return found
