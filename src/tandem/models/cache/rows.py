"""The working rows: one contiguous region of keys and values for every running sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.models.cache.blocks import BLOCK

LENGTH_STEP = 64
"""Rows grow by multiples of this many tokens, itself a multiple of ``BLOCK``."""


class KVCache:
    """One tensor ``[rows, kv_heads, length, D]`` a layer for keys and for values; both axes grow.

    Positions past a row's length hold finite leftovers, which readers mask. ``windows`` are the
    sliding windows of the layers seen so far, ``num_heads`` their key heads by layer. Without
    ``dtype`` what is stored decides.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._rows = 0
        self._length = 0
        self.windows: dict[int | None, None] = {}
        self.num_heads: dict[int, int] = {}

    @property
    def num_layers(self) -> int:
        return len(self._keys)

    @property
    def size_bytes(self) -> int:
        return sum(
            item.numel() * item.element_size()
            for store in self.stores()
            for item in tuple(store.values())
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and tokens that there is room for."""
        return self._rows, self._length

    @property
    def token_bytes(self) -> int:
        """Memory of one token of one row."""
        return sum(
            item.shape[1] * item.shape[3] * item.element_size()
            for store in self.stores()
            for item in store.values()
        )

    @property
    def device(self) -> torch.device:
        return next(iter(self._keys.values())).device

    def stores(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Keys by layer and values by layer."""
        return self._keys, self._values

    def reserve(self, rows: int, length: int) -> None:
        """Make room for ``rows`` sequences of ``length`` tokens, keeping what is stored."""
        length = -(-length // LENGTH_STEP) * LENGTH_STEP
        if rows <= self._rows and length <= self._length:
            return
        if rows > self._rows:
            self._rows = max(rows, 2 * self._rows)
        if length > self._length:
            grown = self._length + self._length // 2
            self._length = max(length, grown - grown % LENGTH_STEP)
        for store in self.stores():
            for layer, old in store.items():
                store[layer] = self._allocate(old)
                store[layer][: old.shape[0], :, : old.shape[2]] = old

    def drop(self) -> None:
        """Forget everything and free the memory; the layers stay known."""
        self._rows = self._length = 0
        for store in self.stores():
            for layer, item in store.items():
                store[layer] = self._allocate(item)

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first ``length`` tokens of rows ``sources`` over rows ``targets``."""
        for store in self.stores():
            for item in store.values():
                item[list(targets), :, :length] = item[list(sources), :, :length]

    def clear_rows(self, rows: Sequence[int]) -> None:
        """Zero rows that may hold non-finite numbers, which a mask would not neutralise."""
        for store in self.stores():
            for item in store.values():
                item[list(rows)] = 0

    def layer(
        self, layer_idx: int, key: Tensor, value: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Storage of one layer, allocated when first seen like ``[1, kv_heads, N, D]`` inputs."""
        if layer_idx not in self._keys:
            self.windows[window] = None
            self.num_heads[layer_idx] = key.shape[1]
            self.dtype = self.dtype or key.dtype
            self._keys[layer_idx] = self._allocate(key)
            self._values[layer_idx] = self._allocate(value)
        return self.stored(layer_idx)

    def stored(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer that was seen."""
        return self._keys[layer_idx], self._values[layer_idx]

    @staticmethod
    def blocked(item: Tensor) -> Tensor:
        """A layer's storage seen as blocks, ``[rows, kv_heads, blocks, BLOCK, D]``."""
        return item.unflatten(2, (-1, BLOCK))

    def _allocate(self, like: Tensor) -> Tensor:
        shape = (self._rows, like.shape[1], self._length, like.shape[3])
        return like.new_zeros(shape, dtype=self.dtype)
