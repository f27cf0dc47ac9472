"""The engine without a model: completions from a script, rollout as real as any. For tests."""

from __future__ import annotations

from tandem.config.schema import RolloutConfig
from tandem.inference.scripted import Script, ScriptedBackend, ScriptedOptions
from tandem.rollout.composed import ComposedInferenceEngine
from tandem.rollout.runtime import Runtime
from tandem.rollout.workflow import EpisodeListener
from tandem.store import StoreWriter


class ScriptedInferenceEngine(ComposedInferenceEngine):
    """``script`` is a function of (prompt ids, seed) or a mapping; None: random short texts."""

    def __init__(
        self,
        rollout: RolloutConfig,
        script: Script | None = None,
        *,
        incarnation: str = "scripted",
        options: ScriptedOptions | None = None,
        seed: int = 0,
        on_episode: EpisodeListener | None = None,
        writer: StoreWriter | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        backend = ScriptedBackend(script, incarnation=incarnation, options=options)
        super().__init__(
            backend, rollout, seed=seed, on_episode=on_episode, writer=writer, runtime=runtime
        )
