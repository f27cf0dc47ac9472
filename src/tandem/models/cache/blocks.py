"""Which block of the prefix store holds what, and who still needs it. No tensors here.

A block is *free*, *held* (by at least one running sequence) or *idle* (filed under its key, held by
nobody, and the first to go when room is needed).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

BLOCK = 16
"""Tokens in a block."""


def num_blocks(tokens: int) -> int:
    """Blocks that ``tokens`` tokens need."""
    return -(-tokens // BLOCK)


def block_keys(tokens: npt.NDArray[np.int64], known: Sequence[bytes] = ()) -> list[bytes]:
    """One key for every full block: SHA-256 of the key before it and of its tokens.

    ``known`` are the keys of the first blocks, if they were computed before.
    """
    keys = list(known)
    for index in range(len(keys), len(tokens) // BLOCK):
        digest = hashlib.sha256(keys[-1] if keys else b"")
        digest.update(tokens[index * BLOCK : (index + 1) * BLOCK].tobytes())
        keys.append(digest.digest())
    return keys


class BlockPool:
    """``capacity`` blocks with reference counts; idle ones are evicted, the longest idle first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._references: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._by_key: dict[Hashable, int] = {}
        self._keys: dict[int, Hashable] = {}

    @property
    def num_held(self) -> int:
        return len(self._references)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def find(self, keys: Iterable[Hashable]) -> list[int]:
        """Blocks of the longest run of ``keys``, from the first on, that are filed."""
        found = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, blocks: Iterable[int]) -> None:
        """Count one more user of each of these filed blocks."""
        for block in blocks:
            self._idle.pop(block, None)
            self._references[block] = self._references.get(block, 0) + 1

    def file(self, key: Hashable) -> int | None:
        """A new block under ``key``, held once, or ``None`` if all blocks are held."""
        assert key not in self._by_key
        if not self._free:
            if not self._idle:
                return None
            self._forget(next(iter(self._idle)))
        block = self._free.pop()
        self._by_key[key], self._keys[block] = block, key
        self._references[block] = 1
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Count one user less; the end of a prefix is evicted before its beginning."""
        for block in reversed(blocks):
            left = self._references[block] - 1
            if left:
                self._references[block] = left
                continue
            del self._references[block]
            if block in self._keys:
                self._idle[block] = None
            else:
                self._free.append(block)

    def clear(self) -> None:
        """Make every key unknown; blocks in use become free when their last user is gone."""
        self._by_key.clear()
        self._keys.clear()
        self._free.extend(self._idle)
        self._idle.clear()

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Assert that every block is accounted for and held by exactly these users."""
        counts: dict[int, int] = {}
        for blocks in holders:
            for block in blocks:
                counts[block] = counts.get(block, 0) + 1
        assert counts == self._references, (counts, self._references)
        groups = [*self._free, *self._references, *self._idle]
        assert sorted(groups) == list(range(self.capacity)), "a block is lost or counted twice"
        assert {self._by_key[key] for key in self._by_key} == set(self._keys)

    def _forget(self, block: int) -> None:
        del self._idle[block]
        del self._by_key[self._keys.pop(block)]
        self._free.append(block)
