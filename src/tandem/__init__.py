"""Tandem: post-train language models with reinforcement learning, from a laptop to a cluster.

The public names are loaded on first use, so that ``import tandem`` needs neither torch nor time.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "EngineRegistry": "tandem.train",
    "TrainEngine": "tandem.train",
    "InferenceEngine": "tandem.rollout",
    "EmbeddedInferenceEngine": "tandem.rollout",
    "ScriptedInferenceEngine": "tandem.rollout",
    "RolloutWorkflow": "tandem.rollout",
    "SingleTurnWorkflow": "tandem.rollout",
    "run_sft": "tandem.trainers",
    "run_dpo": "tandem.trainers",
    "run_reward": "tandem.trainers",
    "run_rl": "tandem.trainers",
    "run_eval": "tandem.trainers",
    "load_config": "tandem.config",
    "GenerationConfig": "tandem.types",
    "LLMRequest": "tandem.types",
    "LLMResponse": "tandem.types",
    "FinetuneSpec": "tandem.types",
    "SaveLoadMeta": "tandem.types",
    "Scheduling": "tandem.types",
    "WeightUpdateMeta": "tandem.types",
    "TandemError": "tandem.errors",
}

__all__ = ["__version__", *sorted(_EXPORTS)]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'tandem' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__
