"""Rollout: from prompts to training batches, with a version on every token and bounded staleness.

The executor, workflows, rewards and the engines put together from a generation backend. Generation
itself is in ``inference``, training in ``train``. Names are loaded on first use: the reward worker
imports this package and must not pay for torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "ComposedInferenceEngine": "tandem.rollout.composed",
    "EmbeddedInferenceEngine": "tandem.rollout.embedded",
    "Episode": "tandem.rollout.workflow",
    "EpisodeRecord": "tandem.store.records",
    "InferenceEngine": "tandem.rollout.engine",
    "RewardPool": "tandem.rollout.reward_pool",
    "RolloutExecutor": "tandem.rollout.executor",
    "RolloutWorkflow": "tandem.rollout.workflow",
    "Reward": "tandem.rollout.scoring",
    "ScriptedInferenceEngine": "tandem.rollout.scripted",
    "SingleTurnWorkflow": "tandem.rollout.single_turn",
    "StalenessLedger": "tandem.rollout.staleness",
    "load_reward": "tandem.rollout.scoring",
    "open_inference_engine": "tandem.rollout.opening",
    "load_workflow": "tandem.rollout.workflow",
    "sample_seed": "tandem.rollout.workflow",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'tandem.rollout' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__
