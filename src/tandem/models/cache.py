"""Keys and values of running sequences, and the attention context that decodes over them.

Rows are sequences, compact from 0; a step is one packed forward pass ``[1, N]`` whose first tokens
continue cached rows (one token a row) and whose other tokens are whole new sequences. Which request
sits in which row is known to the generation engine, not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.models.invariant import (
    KEY_MULTIPLE,
    causal_attention,
    decode_attention,
    fused_causal_attention,
    is_supported,
)

LENGTH_BLOCK = 64


class KVCache:
    """One tensor ``[rows, kv_heads, length, D]`` a layer for keys and for values; both axes grow.

    Positions past a row's length hold finite leftovers, which readers mask.
    """

    def __init__(self) -> None:
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._rows = 0
        self._length = 0

    @property
    def num_layers(self) -> int:
        return len(self._keys)

    @property
    def size_bytes(self) -> int:
        stores = (*self._keys.values(), *self._values.values())
        return sum(item.numel() * item.element_size() for item in stores)

    def reserve(self, rows: int, length: int) -> None:
        """Make room for ``rows`` sequences of ``length`` tokens, keeping what is stored."""
        length = -(-length // LENGTH_BLOCK) * LENGTH_BLOCK
        if rows <= self._rows and length <= self._length:
            return
        if rows > self._rows:
            self._rows = max(rows, 2 * self._rows)
        if length > self._length:
            self._length = max(length, self._length + self._length // 2)
        for store in (self._keys, self._values):
            for layer, old in store.items():
                store[layer] = self._allocate(old)
                store[layer][: old.shape[0], :, : old.shape[2]] = old

    def drop(self) -> None:
        """Forget everything and free the memory."""
        self._keys.clear()
        self._values.clear()
        self._rows = self._length = 0

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy rows ``sources`` over rows ``targets``."""
        for store in (self._keys, self._values):
            for item in store.values():
                item[list(targets)] = item[list(sources)]

    def clear_rows(self, rows: Sequence[int]) -> None:
        """Zero rows that may hold non-finite numbers, which a mask would not neutralise."""
        for store in (self._keys, self._values):
            for item in store.values():
                item[list(rows)] = 0

    def layer(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Storage of one layer, allocated when first seen like ``[1, kv_heads, N, D]`` inputs."""
        if layer_idx not in self._keys:
            self._keys[layer_idx] = self._allocate(key)
            self._values[layer_idx] = self._allocate(value)
        return self._keys[layer_idx], self._values[layer_idx]

    def _allocate(self, like: Tensor) -> Tensor:
        return like.new_zeros(self._rows, like.shape[1], self._length, like.shape[3])


@dataclass(frozen=True, slots=True)
class PrefillGroup:
    """``count`` new sequences of equal ``length``, packed from token ``start`` on.

    Sequence ``sources[i]`` of the group is stored in cache row ``rows[i]``: rows with the same
    prompt share one forward pass.
    """

    start: int
    length: int
    count: int
    rows: Tensor
    sources: Tensor


class CacheContext:
    """Attention of one packed step: ``num_decode`` continued rows, then the prefill groups.

    ``positions`` (int64, on the device) are the positions of the continued rows' new tokens; the
    longest is ``max_position``. Tokens after the last group are filler, whose output is zero.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        positions: Tensor,
        max_position: int,
        groups: Sequence[PrefillGroup] = (),
    ) -> None:
        self._cache = cache
        self._positions = positions
        self._num_decode = positions.shape[0]
        self._num_keys = -(-(max_position + 1) // KEY_MULTIPLE) * KEY_MULTIPLE
        self._rows = torch.arange(self._num_decode, device=positions.device)
        self._groups = groups
        self._masks: dict[tuple[int, int | None], Tensor] = {}

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
        stored = self._cache.layer(layer_idx, key, value)
        if self._num_decode == query.shape[2]:
            return self._decode(stored, query, key, value, scaling, sliding_window)[None]
        out = query.new_zeros(1, query.shape[1], query.shape[2], value.shape[3])
        if self._num_decode:
            out[0, :, : self._num_decode] = self._decode(
                stored, query, key, value, scaling, sliding_window
            )
        for group in self._groups:
            span = slice(group.start, group.start + group.length * group.count)
            out[0, :, span] = self._prefill(
                stored,
                group,
                [item[0, :, span] for item in (query, key, value)],
                scaling,
                sliding_window,
            )
        return out

    def _decode(
        self,
        stored: tuple[Tensor, Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        n = self._num_decode
        keys, values = stored
        keys[self._rows, :, self._positions] = key[0, :, :n].transpose(0, 1)
        values[self._rows, :, self._positions] = value[0, :, :n].transpose(0, 1)
        keys_NKLD, values_NKLD = keys[:n, :, : self._num_keys], values[:n, :, : self._num_keys]
        rows = query[0, :, :n].transpose(0, 1)
        bias = self._decode_mask(query, window)
        out = decode_attention(rows, keys_NKLD, values_NKLD, bias, scaling=scaling)
        return out.transpose(0, 1)

    def _decode_mask(self, scores: Tensor, window: int | None) -> Tensor:
        name = (0, window)
        if name not in self._masks:
            index = torch.arange(self._num_keys, device=scores.device)
            hidden = index > self._positions[:, None]
            if window is not None:
                hidden |= index <= self._positions[:, None] - window
            mask = torch.zeros(hidden.shape, dtype=scores.dtype, device=scores.device)
            self._masks[name] = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        return self._masks[name]

    def _prefill(
        self,
        stored: tuple[Tensor, Tensor],
        group: PrefillGroup,
        packed: Sequence[Tensor],
        scaling: float,
        window: int | None,
    ) -> Tensor:
        shape = (-1, group.count, group.length)
        query, key, value = (
            item.reshape(item.shape[0], *shape[1:], item.shape[2]).transpose(0, 1)
            for item in packed
        )
        for store, new in zip(stored, (key, value), strict=True):
            store[group.rows, :, : group.length] = new[group.sources]
        attention = causal_attention if is_supported(query) else fused_causal_attention
        out = attention(query, key, value, scaling=scaling, window=window)
        return out.transpose(0, 1).flatten(1, 2)
