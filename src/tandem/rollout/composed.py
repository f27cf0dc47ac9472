"""An InferenceEngine made of a generation backend and the rollout executor, for every backend."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tandem.config.schema import RolloutConfig
from tandem.errors import CapabilityError
from tandem.inference.backend import GenerationBackend
from tandem.rollout.engine import EpisodeData, InferenceEngine, ShouldAccept
from tandem.rollout.executor import RolloutExecutor
from tandem.rollout.feed import PromptStream
from tandem.rollout.runtime import Runtime
from tandem.rollout.snapshot import RolloutSnapshot
from tandem.rollout.workflow import EpisodeListener, RolloutWorkflow
from tandem.store import StoreWriter
from tandem.types import FinetuneSpec, LLMRequest, LLMResponse, WeightUpdateMeta, WeightVersion

if TYPE_CHECKING:
    from tensordict import TensorDict


class ComposedInferenceEngine(InferenceEngine):
    """The contract over ``backend``. Requests without a seed get one from (``seed``, rid), in which
    the attempt takes no part. ``writer`` keeps episodes and the schedule in a trajectory store."""

    def __init__(
        self,
        backend: GenerationBackend,
        rollout: RolloutConfig,
        *,
        seed: int = 0,
        on_episode: EpisodeListener | None = None,
        writer: StoreWriter | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        self.backend = backend
        self._seed = seed
        self._is_generation_paused = False
        self.executor = RolloutExecutor(
            self,
            rollout,
            version=self.get_version,
            hold_generation=self._hold_generation,
            on_episode=on_episode,
            writer=writer,
            runtime=runtime,
        )

    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        if addr is not None:
            raise CapabilityError(
                f"{type(self).__name__}.initialize: got addr={addr!r}; this engine runs its own "
                "backend, leave addr out"
            )
        self.backend.start()
        self.executor.start()

    def destroy(self) -> None:
        try:
            self.executor.close()
        finally:
            self.backend.close()

    async def agenerate(self, req: LLMRequest) -> LLMResponse:
        loop = self.executor.loop
        loop.note_request()
        if req.gconfig.seed is None:
            digest = hashlib.sha256(f"{self._seed}/{self._lasting_name(req.rid)}".encode()).digest()
            seed = int.from_bytes(digest[:8], "big") >> 1
            req = replace(req, gconfig=req.gconfig.new(seed=seed))
        started_at = loop.now()
        response = await self.backend.generate(req)
        loop.note_span(
            {
                "name": "generate",
                "started_at": started_at,
                "s": loop.now() - started_at,
                "num_tokens": len(response.output_tokens),
                "stop_reason": response.stop_reason,
            }
        )
        return response

    def _lasting_name(self, rid: str) -> str:
        """A request's name without its attempt: when it is made again, it draws the same tokens."""
        current = self.executor.loop.uid()
        if current is None:
            return rid
        uid, episode_id = current
        return f"{episode_id}{rid.removeprefix(uid)}" if rid.startswith(uid) else rid

    def update_weights(self, meta: WeightUpdateMeta) -> Future[None]:
        return self.backend.update_weights(meta)

    def set_version(self, version: int) -> None:
        self.executor.set_version(version)

    def get_version(self) -> int:
        return self.backend.version.n

    @property
    def weight_version(self) -> WeightVersion:
        """The version that serves, with the incarnation of the run that published it."""
        return self.backend.version

    def submit(self, data: EpisodeData, workflow: RolloutWorkflow) -> int:
        return self.executor.submit(data, workflow)

    def wait(
        self, count: int, timeout: float | None = None, should_accept: ShouldAccept | None = None
    ) -> TensorDict:
        return self.executor.wait(count, timeout, should_accept)

    def rollout_batch(self, data: Sequence[EpisodeData], workflow: RolloutWorkflow) -> TensorDict:
        return self.executor.rollout_batch(data, workflow)

    def prepare_batch(
        self,
        dataloader: PromptStream,
        workflow: RolloutWorkflow,
        should_accept: ShouldAccept | None = None,
    ) -> TensorDict:
        return self.executor.prepare_batch(dataloader, workflow, should_accept)

    def reject(self, episode_ids: Collection[int], reason: str) -> None:
        self.executor.reject(episode_ids, reason)

    def pause(self) -> None:
        self.executor.pause()

    def resume(self) -> None:
        self.executor.resume()

    def pause_generation(self) -> None:
        self.backend.pause_generation()
        self._is_generation_paused = True

    def resume_generation(self) -> None:
        self._is_generation_paused = False
        self.backend.resume_generation()

    def take_metrics(self) -> dict[str, float]:
        return self.executor.take_metrics()

    def busy_s(self) -> float | None:
        """How long the generator has had something to do since its start; None: it does not say."""
        busy: float | None = self.backend.stats().get("busy_s")
        return busy

    def describe(self) -> str:
        lines = [f"{name}: {value}" for name, value in self.backend.stats().items()]
        return "\n".join([self.executor.describe(), *lines])

    def snapshot(self, patience_s: float = -1.0) -> RolloutSnapshot:
        """How rollout stands now; ``TimeoutError`` when its lock is held for ``patience_s``."""
        return self.executor.snapshot(patience_s)

    def state_dict(self) -> dict[str, Any]:
        return self.executor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.executor.load_state_dict(state)

    @contextmanager
    def _hold_generation(self) -> Iterator[None]:
        if self._is_generation_paused:
            yield
            return
        self.backend.pause_generation()
        try:
            yield
        finally:
            self.backend.resume_generation()
