"""Where the parts of an engine live: model, optimizer state and gradients, on the device or away.

How memory is given back is in ``offload``; the modes that trigger it are part of ``engine``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from torch import Tensor

from tandem.train.offload import HostCopy

Part = Literal["model", "optimizer", "grad"]


class Placement:
    """Tracks which parts are away; ``tensors_of`` lists the tensors of a part as they are now."""

    def __init__(self, tensors_of: Callable[[Part], list[Tensor]]) -> None:
        self._tensors_of = tensors_of
        self._host: dict[Part, HostCopy] = {
            "model": HostCopy(),
            "optimizer": HostCopy(),
            "grad": HostCopy(),
        }

    def offload(self, *parts: Part) -> None:
        for part in parts:
            self._host[part].offload(self._tensors_of(part))

    def restore(self, *parts: Part) -> None:
        for part in parts:
            self._host[part].restore()

    def offload_enabled(self, enabled: Mapping[Part, bool]) -> None:
        self.offload(*(part for part, is_enabled in enabled.items() if is_enabled))

    @contextmanager
    def resident(self, *parts: Part) -> Iterator[None]:
        """Bring parts back for a while; what was away goes away again, after errors too."""
        away = [part for part in parts if self._host[part].is_offloaded]
        self.restore(*away)
        try:
            yield
        finally:
            self.offload(*away)
