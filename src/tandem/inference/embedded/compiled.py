"""Decoding passes through ``torch.compile``, one compiled function for each of a few static shapes.

Only passes in which every row decodes come here. Compiling a shape takes from seconds to minutes,
so a shape is compiled when it has been in use for a while; until then, and wherever the compiled
function does not measure faster, the pass runs as it is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from tandem.errors import CapabilityError
from tandem.models.cache import CacheContext

logger = logging.getLogger(__name__)

Forward = Callable[[Tensor, Tensor, CacheContext], Tensor]
Shape = tuple[int, ...]
FIRST_KEYS = 128
WARM_PASSES = 100
"""``auto`` compiles a shape after so many passes: a short run never pays for it."""
_TIMED = 5


def bucket(count: int, smallest: int = 1) -> int:
    """The next power of two times ``smallest``: a run meets a handful of shapes."""
    size = smallest
    while size < count:
        size *= 2
    return size


class CompiledDecode:
    """Chooses between ``forward`` and its compiled form, shape by shape."""

    def __init__(self, forward: Forward, mode: Literal["auto", "on"]) -> None:
        self._forward = forward
        self._mode = mode
        self._passes: dict[Shape, int] = {}
        self._chosen: dict[Shape, Forward] = {}

    def run(self, shape: Shape, tokens: Tensor, positions: Tensor, context: CacheContext) -> Tensor:
        """Logits of one pass; ``shape`` is all that the compiled function may depend on."""
        if shape in self._chosen:
            return self._chosen[shape](tokens, positions, context)
        seen = self._passes[shape] = self._passes.get(shape, 0) + 1
        if self._mode == "on":
            self._chosen[shape] = self._compile()
        elif seen > WARM_PASSES:
            self._chosen[shape] = self._faster(shape, tokens, positions, context)
        return self._chosen.get(shape, self._forward)(tokens, positions, context)

    def _compile(self) -> Forward:
        def forward(tokens: Tensor, positions: Tensor, context: CacheContext) -> Tensor:
            return self._forward(tokens, positions, context)

        compiled: Forward = torch.compile(forward, dynamic=False)
        return compiled

    def _faster(
        self, shape: Shape, tokens: Tensor, positions: Tensor, context: CacheContext
    ) -> Forward:
        """Repeating a pass is harmless: it writes the same keys and values again."""
        compiled = self._compile()
        try:
            compiled(tokens, positions, context)
        except Exception as error:
            logger.warning("decoding %s stays uncompiled: %s", shape, error)
            return self._forward
        seconds = {
            function: min(_timed(function, tokens, positions, context) for _ in range(_TIMED))
            for function in (self._forward, compiled)
        }
        return min(seconds, key=lambda function: seconds[function])


def check_compiler() -> None:
    """Compile something small.

    Raises:
        CapabilityError: this machine cannot.
    """
    try:
        torch.compile(lambda x: (x + 1).exp(), dynamic=False)(torch.ones(3))
    except Exception as error:
        raise CapabilityError(
            f"inference.compile=on: torch.compile does not work here: {error}; install a C++ "
            "compiler or set inference.compile=off"
        ) from error


def _timed(function: Forward, tokens: Tensor, positions: Tensor, context: CacheContext) -> float:
    begun = time.perf_counter()
    function(tokens, positions, context)
    return time.perf_counter() - begun
