"""The prefix store: blocks of keys and values that outlive the sequence that made them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tandem.models.cache.blocks import BlockPool
from tandem.models.cache.rows import KVCache
from tandem.types import WeightVersion

FIRST_SLOTS = 64


class PrefixStore:
    """Copies full blocks out of rows and back; keys hold the tokens and the weights they belong to.

    A capacity of 0 turns it off.
    """

    def __init__(self, capacity: int) -> None:
        self.pool = BlockPool(capacity)
        self._slots = 0
        self._stores: dict[tuple[int, int], Tensor] = {}

    @property
    def size_bytes(self) -> int:
        return sum(item.numel() * item.element_size() for item in tuple(self._stores.values()))

    def match(self, version: WeightVersion, keys: Sequence[bytes]) -> list[int]:
        """The blocks filed for the longest prefix that ``keys`` describe under ``version``."""
        return self.pool.find((version, key) for key in keys)

    def load(self, cache: KVCache, row: int, blocks: Sequence[int]) -> None:
        """Copy ``blocks`` to the beginning of ``row``."""
        index = torch.tensor(blocks, device=cache.device)
        for name, item in _parts(cache, row):
            KVCache.blocked(item)[: len(blocks)] = self._stores[name][index]

    def file(
        self, cache: KVCache, row: int, version: WeightVersion, keys: Sequence[bytes]
    ) -> list[int]:
        """File the first ``len(keys)`` blocks of ``row``; hold and return them.

        Fewer come back when everything else in the store is in use.
        """
        held = self.match(version, keys)
        self.pool.hold(held)
        first = len(held)
        for key in keys[first:]:
            block = self.pool.file((version, key))
            if block is None:
                break
            held.append(block)
        if len(held) > first:
            self._copy_in(cache, row, held, first)
        return held

    def _copy_in(self, cache: KVCache, row: int, held: Sequence[int], first: int) -> None:
        self._reserve(cache, row, max(held) + 1)
        index = torch.tensor(held[first:], device=cache.device)
        for name, item in _parts(cache, row):
            self._stores[name][index] = KVCache.blocked(item)[first : len(held)]

    def _reserve(self, cache: KVCache, row: int, slots: int) -> None:
        if slots <= self._slots:
            return
        self._slots = min(self.pool.capacity, max(slots, 2 * self._slots, FIRST_SLOTS))
        for name, item in _parts(cache, row):
            grown = item.new_empty(self._slots, *KVCache.blocked(item).shape[1:])
            old = self._stores.get(name)
            if old is not None:
                grown[: old.shape[0]] = old
            self._stores[name] = grown


def _parts(cache: KVCache, row: int) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """What a row holds, ``[kv_heads, length, D]``, under (keys or values, layer)."""
    shelf, slot = cache.locate(row)
    for at, store in enumerate((shelf.keys, shelf.values)):
        for layer, item in store.items():
            yield (at, layer), item[slot]
