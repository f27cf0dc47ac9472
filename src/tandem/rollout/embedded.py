"""The engine that generates with our own decoder, in a thread or in a child process."""

from __future__ import annotations

from tandem.config.schema import InferenceConfig, RolloutConfig
from tandem.inference.embedded import ChildBackend, EmbeddedBackend
from tandem.rollout.composed import ComposedInferenceEngine
from tandem.rollout.workflow import EpisodeListener
from tandem.store import StoreWriter


class EmbeddedInferenceEngine(ComposedInferenceEngine):
    """``inference.mode`` chooses ``ChildBackend`` (a core of its own) or ``EmbeddedBackend``."""

    def __init__(
        self,
        inference: InferenceConfig,
        rollout: RolloutConfig,
        *,
        model_path: str,
        incarnation: str,
        tokenizer_path: str | None = None,
        seed: int = 0,
        on_episode: EpisodeListener | None = None,
        writer: StoreWriter | None = None,
    ) -> None:
        backend_class = ChildBackend if inference.mode == "process" else EmbeddedBackend
        backend = backend_class(inference, model_path, incarnation, tokenizer_path=tokenizer_path)
        super().__init__(backend, rollout, seed=seed, on_episode=on_episode, writer=writer)
