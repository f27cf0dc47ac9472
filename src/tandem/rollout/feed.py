"""Where the next training prompt comes from, and how the position survives a resume.

Reads sources; does not know when to read (the executor) nor what rows look like (``data/``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from tandem.errors import CheckpointError, DataError
from tandem.types import EPISODE_STRIDE, Prompt


@runtime_checkable
class RandomAccessPrompts(Protocol):
    """``tandem.data.PromptSource``: rows of one epoch, addressed by (epoch, position)."""

    def __len__(self) -> int: ...

    def prompt(self, epoch: int, position: int) -> Prompt: ...


PromptStream = RandomAccessPrompts | Iterable[Prompt | Mapping[str, Any]]


class PromptFeed:
    """Next item of a stream: first the episodes a resume must run again, then new ones.

    A random-access source goes on for ever, epoch after epoch. A plain iterable is started again at
    its end; a one-shot iterator ends for good.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.position = 0
        self._reruns: deque[tuple[int, int]] = deque()
        self._source: object | None = None
        self._iterator: Iterator[Prompt | Mapping[str, Any]] | None = None

    @property
    def reruns(self) -> list[tuple[int, int]]:
        """(episode id, attempt) still to run again."""
        return list(self._reruns)

    def take(
        self, source: PromptStream, count: int
    ) -> list[tuple[Prompt | Mapping[str, Any], int | None]]:
        """Up to ``count`` items with the attempt to run (None: the next one); fewer at an end."""
        # Once, not for every prompt: the check of a protocol is slow.
        random_access = source if isinstance(source, RandomAccessPrompts) else None
        items: list[tuple[Prompt | Mapping[str, Any], int | None]] = []
        while len(items) < count:
            if self._reruns:
                items.append(self._rerun(source, random_access))
                continue
            if random_access is not None:
                item: Prompt | Mapping[str, Any] = self._next(random_access)
            elif (found := self._next_of_iterable(source)) is not None:  # type: ignore[arg-type]
                item = found
            else:
                break
            items.append((item, None))
        return items

    def _rerun(
        self, source: PromptStream, random_access: RandomAccessPrompts | None
    ) -> tuple[Prompt, int]:
        if random_access is None:
            raise CheckpointError(
                f"{len(self._reruns)} open episodes must run again, which needs a source with "
                f"prompt(epoch, position); got a {type(source).__name__}"
            )
        episode_id, attempt = self._reruns[0]
        item = random_access.prompt(*divmod(episode_id, EPISODE_STRIDE))
        self._reruns.popleft()
        return item, attempt

    def _next(self, source: RandomAccessPrompts) -> Prompt:
        length = len(source)
        if length < 1:
            raise DataError("the prompt source has 0 rows; at least 1 is needed")
        if self.position >= length:
            self.epoch, self.position = self.epoch + 1, 0
        item = source.prompt(self.epoch, self.position)
        self.position += 1
        return item

    def _next_of_iterable(
        self, source: Iterable[Prompt | Mapping[str, Any]]
    ) -> Prompt | Mapping[str, Any] | None:
        if self._iterator is None or self._source is not source:
            self._source, self._iterator = source, iter(source)
        item = next(self._iterator, None)
        if item is None and self._iterator is not source:
            self._iterator = iter(source)
            item = next(self._iterator, None)
            if item is None:
                raise DataError("the data loader has 0 rows; at least 1 is needed")
        return item

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any], reruns: Iterable[tuple[int, int]]) -> None:
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._reruns = deque(reruns)
        self._source = self._iterator = None
