"""The contract of what turns token ids into token ids. Rollout policy does not belong here.

Everything an episode needs (groups, rewards, staleness) is built above a backend in ``rollout/``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, ClassVar

from tandem.types import LLMRequest, LLMResponse, WeightUpdateMeta, WeightVersion


class GenerationBackend(ABC):
    """Generates completions under versioned weights.

    ``generate`` may be awaited from any event loop and any number of times at once; the other
    methods are thread-safe and short unless they say that they block. All times are in seconds.
    """

    capabilities: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def start(self) -> None:
        """Start serving; blocks until the first request can be taken. Idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; requests still running end with ``EngineError``. Idempotent."""

    @abstractmethod
    async def generate(self, req: LLMRequest) -> LLMResponse:
        """Complete one prompt (``gconfig.n_samples`` must be 1 here).

        Cancelling the awaiting task aborts the request at the next token border. With the
        capability ``streaming``, ``req.on_tokens`` is told of every token when it is made.

        Raises:
            ConfigError: the request asks for what this backend cannot honour.
            DataError: the prompt is empty or longer than the context.
            EngineError: the backend died or was closed.
        """

    @abstractmethod
    def update_weights(self, meta: WeightUpdateMeta) -> Future[None]:
        """Begin an update and return at once; the future ends when ``meta.version`` is committed.

        Running requests stop at a token border and go on under the new weights. On an error the
        future holds ``WeightSyncError``, the old version serves on, and nothing is left paused.
        """

    @property
    @abstractmethod
    def version(self) -> WeightVersion:
        """The weights that serve now."""

    @abstractmethod
    def pause_generation(self) -> None:
        """Stop at the next token border and keep every running request; blocks until stopped."""

    @abstractmethod
    def resume_generation(self) -> None:
        """Go on after ``pause_generation``."""

    @abstractmethod
    def stats(self) -> Mapping[str, Any]:
        """Counters for humans and metrics: running, waiting, tokens made, memory, threads."""
