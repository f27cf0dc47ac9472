"""The working rows: one contiguous region of keys and values for every running sequence.

Rows lie on *shelves* of one length each, doubling from shelf to shelf, and a row that outgrows its
shelf moves to the next. So attention over the rows of a shelf reads at most twice what they hold,
and a long sequence does not make the short ones beside it longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.models.cache.blocks import BLOCK

FIRST_LENGTH = 64
"""Tokens of a row on the first shelf, a multiple of ``BLOCK``."""
KEPT_SHELF_BYTES = 1 << 26
"""Memory of an empty shelf that is kept for the next rows."""

Int64s = npt.NDArray[np.int64]


class Shelf:
    """By layer, keys and values ``[slots, kv_heads, length, D]``; ``rows[i]`` is in slot i.

    Positions past what a row holds are finite leftovers, which readers mask.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.rows: list[int] = []
        self.num_slots = 0
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.keys.values(), *self.values.values()]

    @property
    def size_bytes(self) -> int:
        return sum(item.nbytes for item in self.tensors)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Heads and width of a layer's keys and of its values."""

    shapes: tuple[tuple[int, int], tuple[int, int]]
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        return sum(heads * width for heads, width in self.shapes) * self.dtype.itemsize

    def allocate(self, slots: int, length: int) -> tuple[Tensor, Tensor]:
        keys, values = (
            torch.zeros(slots, heads, length, width, dtype=self.dtype, device=self.device)
            for heads, width in self.shapes
        )
        return keys, values


class KVCache:
    """Rows 0, 1, ... on shelves. ``windows`` are the sliding windows of the layers seen so far,
    ``num_heads`` their key heads by layer. Without ``dtype`` what is stored decides."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        self.windows: dict[int | None, None] = {}
        self.num_heads: dict[int, int] = {}
        self._layers: dict[int, _Layer] = {}
        self._shelves: dict[int, Shelf] = {}
        self._at: list[tuple[Shelf, int]] = []
        self._room: Int64s = np.zeros(0, dtype=np.int64)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def size_bytes(self) -> int:
        return sum(shelf.size_bytes for shelf in tuple(self._shelves.values()))

    @property
    def token_bytes(self) -> int:
        """Memory of one token of one row."""
        return sum(layer.token_bytes for layer in self._layers.values())

    @property
    def device(self) -> torch.device:
        return next(iter(self._layers.values())).device

    @property
    def shelves(self) -> list[Shelf]:
        """Those with rows, short rows first."""
        return [shelf for _, shelf in sorted(self._shelves.items()) if shelf.rows]

    @property
    def order(self) -> list[int]:
        """The rows in the order in which they lie."""
        return [row for shelf in self.shelves for row in shelf.rows]

    def locate(self, row: int) -> tuple[Shelf, int]:
        """Its shelf and slot."""
        return self._at[row]

    def reserve(self, lengths: Sequence[int] | Int64s) -> None:
        """Make room for ``len(lengths)`` rows of so many tokens each, keeping what is stored."""
        needed = np.asarray(lengths, dtype=np.int64)
        known = len(self._at)
        if len(needed) == known and (needed <= self._room).all():
            return
        moving: dict[tuple[int, int], list[int]] = {}
        for row, tokens in enumerate(needed.tolist()):
            length = self._at[row][0].length if row < known else 0
            if tokens > length:
                moving.setdefault((length, _shelf_length(tokens)), []).append(row)
        for (old, new), rows in moving.items():
            shelf = self._shelves.setdefault(new, Shelf(new))
            places = self._add(shelf, rows)
            if old:
                self._lift(rows, self._shelves[old], shelf, places)
        self._index()

    def keep(self, rows: Sequence[int]) -> None:
        """Row ``rows[i]`` is row i from here on, the others are gone."""
        numbers = {old: new for new, old in enumerate(rows)}
        for shelf in self.shelves:
            self._vacate(shelf, {slot for slot, r in enumerate(shelf.rows) if r not in numbers})
            shelf.rows = [numbers[row] for row in shelf.rows]
        self._index()

    def drop(self) -> None:
        """Forget everything and free the memory; the layers stay known."""
        self._shelves = {}
        self._index()

    def clear_rows(self, rows: Sequence[int]) -> None:
        """Zero rows that may hold non-finite numbers, which a mask would not neutralise."""
        for shelf, slot in map(self.locate, rows):
            for item in shelf.tensors:
                item[slot] = 0

    def see(self, layer_idx: int, key: Tensor, value: Tensor, window: int | None) -> None:
        """Allocate a layer's storage when it is first seen, like ``[1, kv_heads, N, D]`` inputs."""
        if layer_idx in self._layers:
            return
        self.windows[window], self.num_heads[layer_idx] = None, key.shape[1]
        self.dtype = self.dtype or key.dtype
        shapes = ((key.shape[1], key.shape[3]), (value.shape[1], value.shape[3]))
        layer = self._layers[layer_idx] = _Layer(shapes, self.dtype, key.device)
        for shelf in self._shelves.values():
            stored = layer.allocate(shelf.num_slots, shelf.length)
            shelf.keys[layer_idx], shelf.values[layer_idx] = stored

    @staticmethod
    def blocked(item: Tensor) -> Tensor:
        """A row's keys or values seen as blocks, ``[blocks, kv_heads, BLOCK, D]``."""
        return item.unflatten(1, (-1, BLOCK)).transpose(0, 1)

    # --- shelves ---

    def _add(self, shelf: Shelf, rows: Sequence[int]) -> slice:
        """Put rows into new slots, which hold leftovers."""
        first, count = len(shelf.rows), len(shelf.rows) + len(rows)
        shelf.rows.extend(rows)
        if count > shelf.num_slots:
            shelf.num_slots = max(count, shelf.num_slots + shelf.num_slots // 2)
            for index, layer in self._layers.items():
                new = layer.allocate(shelf.num_slots, shelf.length)
                for store, item in zip((shelf.keys, shelf.values), new, strict=True):
                    if index in store:
                        item[:first] = store[index][:first]
                    store[index] = item
        return slice(first, count)

    def _lift(self, rows: Sequence[int], old: Shelf, new: Shelf, places: slice) -> None:
        """Take what rows hold along to their new slots."""
        slots = [old.rows.index(row) for row in rows]
        for source, target in zip(old.tensors, new.tensors, strict=True):
            target[places, :, : old.length] = source[slots]
        self._vacate(old, set(slots))

    @staticmethod
    def _vacate(shelf: Shelf, slots: set[int]) -> None:
        """Empty these slots; rows from the end fill the holes."""
        count = len(shelf.rows) - len(slots)
        holes = [slot for slot in range(count) if slot in slots]
        fillers = [slot for slot in range(count, len(shelf.rows)) if slot not in slots]
        if holes:
            for item in shelf.tensors:
                item[holes] = item[fillers]
        for hole, filler in zip(holes, fillers, strict=True):
            shelf.rows[hole] = shelf.rows[filler]
        del shelf.rows[count:]
        if not shelf.rows and shelf.size_bytes > KEPT_SHELF_BYTES:
            shelf.num_slots = 0
            shelf.keys.clear()
            shelf.values.clear()

    def _index(self) -> None:
        places = {
            row: (shelf, slot) for shelf in self.shelves for slot, row in enumerate(shelf.rows)
        }
        self._at = [places[row] for row in range(len(places))]
        self._room = np.array([shelf.length for shelf, _ in self._at], dtype=np.int64)


def _shelf_length(tokens: int) -> int:
    length = FIRST_LENGTH
    while length < tokens:
        length *= 2
    return length
