"""From configuration to an InferenceEngine. The engines themselves have files of their own."""

from __future__ import annotations

from typing import Any

from tandem.config.schema import InferenceConfig, RolloutConfig
from tandem.inference.scripted import ScriptedOptions
from tandem.rollout.composed import ComposedInferenceEngine
from tandem.rollout.embedded import EmbeddedInferenceEngine
from tandem.rollout.scripted import ScriptedInferenceEngine
from tandem.store import StoreWriter


def open_inference_engine(
    inference: InferenceConfig,
    rollout: RolloutConfig,
    *,
    model_path: str,
    tokenizer: Any,
    incarnation: str,
    seed: int,
    tokenizer_path: str | None = None,
    writer: StoreWriter | None = None,
) -> ComposedInferenceEngine:
    """The engine that ``inference.backend`` names, started.

    ``scripted`` completes prompts with random texts that are a function of (prompt, seed).
    ``tokenizer_path`` is that of ``tokenizer`` when it does not lie in ``model_path``; ``writer``
    that of the run's trajectory store.
    """
    engine: ComposedInferenceEngine
    if inference.backend == "scripted":
        options = ScriptedOptions(vocab_size=len(tokenizer), eos_id=int(tokenizer.eos_token_id))
        engine = ScriptedInferenceEngine(
            rollout, incarnation=incarnation, options=options, seed=seed, writer=writer
        )
    else:
        engine = EmbeddedInferenceEngine(
            inference,
            rollout,
            model_path=model_path,
            incarnation=incarnation,
            tokenizer_path=tokenizer_path,
            seed=seed,
            writer=writer,
        )
    engine.initialize()
    return engine
