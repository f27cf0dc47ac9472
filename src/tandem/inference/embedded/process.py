"""The embedded engine in a child process of its own, so that it overlaps with training.

The child is a plain subprocess that speaks JSON frames over its pipes; new weights reach it as a
manifest and the name of a file that it opens and verifies itself.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from tandem.config.schema import InferenceConfig
from tandem.errors import EngineError
from tandem.inference.backend import GenerationBackend
from tandem.inference.embedded.backend import CAPABILITIES, CLOSED, at_border
from tandem.inference.embedded.link import ChildLink
from tandem.inference.embedded.pending import Pending
from tandem.inference.updates import PendingUpdate
from tandem.types import LLMRequest, LLMResponse, WeightUpdateMeta, WeightVersion
from tandem.weights import Published

STATS_TIMEOUT_S = 30.0


class ChildBackend(GenerationBackend):
    """Owns one child process; its death fails everything that waits, with its last words."""

    capabilities = CAPABILITIES

    def __init__(
        self,
        config: InferenceConfig,
        model_path: str,
        incarnation: str,
        *,
        tokenizer_path: str | None = None,
    ) -> None:
        self._config = config
        self._model_path = model_path
        self._tokenizer_path = tokenizer_path
        self._version = WeightVersion(incarnation, 0)
        self._pending = Pending()
        self._starting = threading.Lock()
        self._child: ChildLink | None = None

    def start(self) -> None:
        with self._starting:
            self._pending.refuse_if_ended()
            if self._child is None:
                child = ChildLink(self._pending, self._config.threads)
                first = {
                    "config": self._config.model_dump(mode="json"),
                    "model_path": self._model_path,
                    "incarnation": self._version.incarnation,
                    "tokenizer_path": self._tokenizer_path,
                }
                child.begin(first, self._config.start_timeout_s)
                self._child = child

    def close(self) -> None:
        self._pending.end(CLOSED)
        with self._starting:
            child, self._child = self._child, None
        if child is not None:
            child.close()

    async def generate(self, req: LLMRequest) -> LLMResponse:
        child = self._running()
        return await self._pending.run(req, child.generate, child.abort)

    def update_weights(self, meta: WeightUpdateMeta) -> Future[None]:
        child = self._running()
        update = self._pending.add_update(
            lambda: PendingUpdate(
                meta,
                lambda published: self._commit(child, published),
                timeout_s=self._config.update_timeout_s,
                on_stuck=child.kill,
            )
        )
        return update.future

    def _commit(self, child: ChildLink, published: Published) -> Future[None]:
        manifest = published.manifest

        def committed(_: Any) -> None:
            self._version = WeightVersion(manifest.incarnation, manifest.version)

        return child.call("commit", {"published": published.to_json()}, on_success=committed)

    @property
    def version(self) -> WeightVersion:
        return self._version

    def pause_generation(self) -> None:
        at_border(self._running().call("pause"), self._config)

    def resume_generation(self) -> None:
        at_border(self._running().call("resume"), self._config)

    def stats(self) -> Mapping[str, Any]:
        child = self._running()
        stats: dict[str, Any] = child.call("stats").result(STATS_TIMEOUT_S)
        return {**stats, "pid": child.pid}

    def _running(self) -> ChildLink:
        self._pending.refuse_if_ended()
        if self._child is None:
            raise EngineError("the generation backend is not started; call start() first")
        return self._child
