"""Examples of a supervised stage in a resumable order, whatever one example is.

What rows of a file become is decided in ``demonstrations`` and ``preferences``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from tandem.data.order import ShuffledOrder

Example = TypeVar("Example")


class ExampleSource(Generic[Example]):
    """Examples in an order that is a function of (seed, epoch), with a resumable cursor.

    ``digest`` tells these examples from others when a run resumes; ``dropped`` counts the rows left
    out, by reason.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        *,
        digest: str,
        seed: tuple[int, ...] = (0,),
        shuffle: bool = True,
        dropped: Mapping[str, int] | None = None,
    ) -> None:
        self._examples = examples
        self.dropped = dict(dropped or {})
        self._order = ShuffledOrder(len(examples), seed=seed, shuffle=shuffle, digest=digest)

    def __len__(self) -> int:
        return len(self._examples)

    def example(self, epoch: int, position: int) -> Example:
        return self._examples[self._order.row(epoch, position)]

    def all(self) -> list[Example]:
        """Every example once, in the order of the source, as for evaluation."""
        return list(self._examples)

    def annotate(self, examples: Sequence[Example]) -> None:
        """Put in place of every example, in the order of ``all``, one that says more about it."""
        assert len(examples) == len(self._examples)
        self._examples = examples

    def batches(self, size: int, *, epochs: int | None = None) -> Iterator[list[Example]]:
        """Batches from the cursor to the end of epoch number ``epochs`` (``None``: for ever).

        The last batch of an epoch may be smaller, so that every example is used once an epoch.
        After a batch has been handed out, ``state_dict`` speaks of the next one.
        """
        for addresses in self._order.batches(size, epochs):
            yield [self.example(*address) for address in addresses]

    def state_dict(self) -> dict[str, Any]:
        return self._order.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken; ``DataError`` when the data have changed."""
        self._order.load_state_dict(state)
