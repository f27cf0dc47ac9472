"""The embedded engine as a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, NamedTuple

from tandem.config.schema import InferenceConfig
from tandem.errors import EngineError
from tandem.inference.backend import GenerationBackend
from tandem.inference.embedded.build import build_core
from tandem.inference.embedded.core import EmbeddedCore
from tandem.inference.embedded.filler import WeightFiller
from tandem.inference.embedded.loop import CoreLoop
from tandem.inference.embedded.pending import Pending
from tandem.inference.updates import PendingUpdate
from tandem.types import LLMRequest, LLMResponse, WeightUpdateMeta, WeightVersion

CLOSED = "the generation backend was closed; start a new one"
CAPABILITIES = frozenset(
    {
        "seed",
        "logprobs",
        "raw_logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "versions",
        "stop_strings",
        "interruption",
        "streaming",
        "weight_update",
    }
)


def at_border(done: Future[None], config: InferenceConfig) -> None:
    """Wait for what is done at the next token border, as long as for a weight update.

    Raises:
        EngineError: the generator did not come to a border in time.
    """
    try:
        done.result(config.update_timeout_s)
    except FutureTimeoutError:
        raise EngineError(
            f"the generator reached no token border within {config.update_timeout_s:g} s "
            "(inference.update_timeout_s); it hangs or is very slow"
        ) from None


class _Engine(NamedTuple):
    core: EmbeddedCore
    loop: CoreLoop
    filler: WeightFiller


class EmbeddedBackend(GenerationBackend):
    """Shares this process's torch threads with whatever else runs here (``threads`` is unused)."""

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
        self._incarnation = incarnation
        self._pending = Pending()
        self._starting = threading.Lock()
        self._engine: _Engine | None = None

    def start(self) -> None:
        with self._starting:
            self._pending.refuse_if_ended()
            if self._engine is None:
                core = build_core(
                    self._config,
                    self._model_path,
                    self._incarnation,
                    tokenizer_path=self._tokenizer_path,
                )
                loop = CoreLoop(core, deliver=self._pending.deliver, die=self._die)
                self._engine = _Engine(core, loop, WeightFiller(core, loop))
                loop.start()

    def close(self) -> None:
        self._pending.end(CLOSED)
        with self._starting:
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.filler.close()
            engine.loop.close()
            engine.core.weights.release()

    async def generate(self, req: LLMRequest) -> LLMResponse:
        loop = self._running().loop
        return await self._pending.run(
            req,
            lambda ticket, request: loop.submit([(ticket, request)]),
            lambda ticket: loop.abort([ticket]),
        )

    def update_weights(self, meta: WeightUpdateMeta) -> Future[None]:
        filler = self._running().filler
        update = self._pending.add_update(
            lambda: PendingUpdate(
                meta,
                filler.commit,
                timeout_s=self._config.update_timeout_s,
                on_stuck=self._pending.end,
            )
        )
        return update.future

    @property
    def version(self) -> WeightVersion:
        engine = self._engine
        return WeightVersion(self._incarnation, 0) if engine is None else engine.core.version

    def pause_generation(self) -> None:
        at_border(self._running().loop.call(EmbeddedCore.pause), self._config)

    def resume_generation(self) -> None:
        at_border(self._running().loop.call(EmbeddedCore.resume), self._config)

    def stats(self) -> Mapping[str, Any]:
        return self._running().loop.stats()

    def _running(self) -> _Engine:
        self._pending.refuse_if_ended()
        if self._engine is None:
            raise EngineError("the generation backend is not started; call start() first")
        return self._engine

    def _die(self, error: Exception) -> None:
        self._pending.end(f"the generation loop died: {type(error).__name__}: {error}")
