"""Attention of rows that get one token each: one call for the rows of a shelf."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tandem.models import invariant
from tandem.models.cache.rows import Int64s, KVCache, Shelf
from tandem.models.invariant import KEY_BLOCK, KEY_MULTIPLE

Mask = tuple[torch.dtype, int | None]


class DecodedRows:
    """The first rows of ``cache``, with new tokens at ``positions``.

    Where the rows lie on one shelf in their order nothing is gathered.
    """

    def __init__(self, cache: KVCache, positions: Int64s, *, is_fast: bool) -> None:
        self._cache = cache
        self._is_fast = is_fast
        self._positions = positions
        self._spans = list(_spans(cache, positions))
        first = self._spans[0] if self._spans else None
        self._is_gathered = len(self._spans) > 1 or (first is not None and not first.is_in_order)
        self._tensors: tuple[Tensor, Tensor] | None = None

    @property
    def form(self) -> tuple[int | bool, ...]:
        """What the operators depend on beside sizes."""
        blocks = (0 if self._is_fast else (span.num_keys - 1) // KEY_BLOCK for span in self._spans)
        return (self._is_gathered, *blocks)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Slots and keys of every call."""
        return tuple(size for span in self._spans for size in (span.num_slots, span.num_keys))

    @property
    def inputs(self) -> list[Tensor]:
        """All that the layers of a decoding pass read beside their own tensors; the cache knows
        its layers."""
        positions, order = self._placed(self._cache.device)
        dtype = self._cache.dtype
        assert dtype is not None
        found = [positions, order]
        for span in self._spans:
            found += [span.rows, span.picked, span.positions, *span.shelf.tensors]
            found += [span.places(heads) for heads in set(self._cache.num_heads.values())]
            found += [span.mask(dtype, window) for window in self._cache.windows]
        return found

    def count(self, device: torch.device) -> int:
        """How many rows; while a pass is recorded, a size of it."""
        return self._placed(device)[0].shape[0]

    def attend(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        """``[1, heads, n, D]``, of one new token for each row. Few operations: for small models
        their number is what a step costs."""
        _, order = self._placed(query.device)
        heads, outs = self._cache.num_heads[layer_idx], []
        for span in self._spans:
            keys, values = span.shelf.keys[layer_idx], span.shelf.values[layer_idx]
            places, mask = span.places(heads), span.mask(query.dtype, window)
            for stored, new in ((keys, key), (values, value)):
                width = new.shape[3]
                if self._is_gathered:
                    new = new.index_select(2, span.rows)
                stored.view(-1, width).index_copy_(
                    0, places, new.transpose(1, 2).reshape(-1, width)
                )
            asked = query.index_select(2, span.picked) if self._is_gathered else query
            slots, num_keys = asked.shape[2], mask.shape[-1]
            is_fused = self._is_fast or not invariant.is_supported(query)
            attention = fused_decode_attention if is_fused else invariant.decode_attention
            out = attention(
                asked.transpose(1, 2)[0],
                keys[:slots, :, :num_keys],
                values[:slots, :, :num_keys],
                mask,
                scaling=scaling,
            )
            outs.append(out)
        out = torch.cat(outs).index_select(0, order) if self._is_gathered else outs[0]
        return out.transpose(0, 1)[None]

    def _placed(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Positions of the rows, and where their results lie among those of all calls."""
        if self._tensors is None:
            order = np.zeros(len(self._positions), dtype=np.int64)
            first = 0
            for span in self._spans:
                order[span.row_numbers] = first + span.slots
                first += span.num_slots
                span.place_on(device)
            self._tensors = (_on(self._positions, device), _on(order, device))
        return self._tensors


class _Span:
    """The decoded rows of one shelf, in slot order. Other rows in between are attended for too,
    and not heard."""

    rows: Tensor
    picked: Tensor
    positions: Tensor

    def __init__(self, shelf: Shelf, rows: Int64s, slots: Int64s, positions: Int64s) -> None:
        self.shelf = shelf
        self.row_numbers, self.slots = rows, slots
        self.num_slots = int(slots[-1]) + 1
        self._positions = positions
        self.num_keys = -(-(int(positions.max()) + 1) // KEY_MULTIPLE) * KEY_MULTIPLE
        self._places: dict[int, Tensor] = {}
        self._masks: dict[Mask, Tensor] = {}

    @property
    def is_in_order(self) -> bool:
        index = np.arange(self.num_slots)
        return np.array_equal(self.row_numbers, index) and np.array_equal(self.slots, index)

    def place_on(self, device: torch.device) -> None:
        picked = np.zeros(self.num_slots, dtype=np.int64)
        positions = picked.copy()
        picked[self.slots], positions[self.slots] = self.row_numbers, self._positions
        self.rows = _on(self.row_numbers, device)
        self.picked, self.positions = _on(picked, device), _on(positions, device)

    def places(self, heads: int) -> Tensor:
        """Of every (row, head): its new token among all ``slots * heads * length``."""
        if heads not in self._places:
            first = (self.slots[:, None] * heads + np.arange(heads)) * self.shelf.length
            places = (first + self._positions[:, None]).reshape(-1)
            self._places[heads] = _on(places, self.positions.device)
        return self._places[heads]

    def mask(self, dtype: torch.dtype, window: int | None) -> Tensor:
        """``[slots, 1, 1, keys]``, to be added to scores."""
        if (dtype, window) not in self._masks:
            index = torch.arange(self.num_keys, device=self.positions.device)
            hidden = index > self.positions[:, None]
            if window is not None:
                hidden |= index <= self.positions[:, None] - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._masks[dtype, window] = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        return self._masks[dtype, window]


def _spans(cache: KVCache, positions: Int64s) -> Iterator[_Span]:
    for shelf in cache.shelves:
        numbers = np.array(shelf.rows, dtype=np.int64)
        slots = np.flatnonzero(numbers < len(positions))
        if len(slots):
            rows = numbers[slots]
            yield _Span(shelf, rows, slots, positions[rows])


def _on(values: Int64s, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device)


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
