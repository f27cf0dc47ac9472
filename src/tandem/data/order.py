"""The order in which rows are visited, as a function of (seed, epoch), and the place in it.

One mechanism for prompts and demonstrations: every item has an address (epoch, position), so a
resume is exact without replaying or skipping anything, and whoever fetches ahead loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from tandem.errors import DataError


@lru_cache(maxsize=8)
def _permutation(seed: tuple[int, ...], epoch: int, length: int) -> tuple[int, ...]:
    # Sorting raw 64-bit words, not Generator.permutation, whose stream numpy may change.
    words = np.random.Philox(np.random.SeedSequence((*seed, epoch))).random_raw(length)
    return tuple(np.argsort(words, kind="stable").tolist())


class ShuffledOrder:
    """Addresses (epoch, position) of ``length`` rows, and a cursor over them.

    ``seed`` is any tuple of non-negative integers. Not thread-safe.
    """

    def __init__(self, length: int, *, seed: tuple[int, ...], shuffle: bool, digest: str = ""):
        self._length = length
        self._seed = seed
        self._shuffle = shuffle
        self._digest = digest
        self._epoch = 0
        self._position = 0

    def __len__(self) -> int:
        return self._length

    @property
    def address(self) -> tuple[int, int]:
        """The (epoch, position) that ``advance`` returns next."""
        return self._epoch, self._position

    def row(self, epoch: int, position: int) -> int:
        """Index of the row at an address.

        Raises:
            IndexError: outside ``0 <= position < len(self)`` or a negative epoch.
        """
        if epoch < 0 or not 0 <= position < self._length:
            raise IndexError(
                f"(epoch, position) {(epoch, position)}: allowed: epoch >= 0, "
                f"0 <= position < {self._length}"
            )
        if not self._shuffle:
            return position
        return _permutation(self._seed, epoch, self._length)[position]

    def advance(self) -> tuple[int, int]:
        """The current address; the cursor moves on, over the end of an epoch into the next."""
        here = self.address
        self._position += 1
        if self._position == self._length:
            self._epoch, self._position = self._epoch + 1, 0
        return here

    def batches(self, size: int, epochs: int | None = None) -> Iterator[list[tuple[int, int]]]:
        """Batches of addresses from the cursor on; the last of an epoch may be smaller.

        The cursor stands behind a batch as soon as it is handed out. ``epochs`` is the total
        number of epochs, those before the cursor included; ``None`` never ends.
        """
        while epochs is None or self._epoch < epochs:
            count = min(size, self._length - self._position)
            yield [self.advance() for _ in range(count)]

    def state_dict(self) -> dict[str, Any]:
        """The cursor, with what it takes to notice that the data are no longer the same."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "length": self._length,
            "seed": list(self._seed),
            "shuffle": self._shuffle,
            "digest": self._digest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move the cursor to where it was.

        Raises:
            DataError: the state is of other rows, another seed, or malformed.
        """
        mine = self.state_dict()
        if set(state) != set(mine):
            raise DataError(f"data position: got keys {sorted(state)}, expected {sorted(mine)}")
        for key in ("length", "seed", "shuffle", "digest"):
            if state[key] != mine[key]:
                raise DataError(
                    f"data position: {key} was {state[key]!r} when it was saved and is "
                    f"{mine[key]!r} now; resume with the same data and seeds"
                )
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch < 0 or not 0 <= position < self._length:
            raise DataError(f"data position: {(epoch, position)} is outside {self._length} rows")
        self._epoch, self._position = epoch, position
