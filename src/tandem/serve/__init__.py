"""The HTTP face of an InferenceEngine: an OpenAI-compatible gateway, and agents that speak to it.

Generation itself is in ``inference``, trajectories become batches in ``rollout``. Names are loaded
on first use, so that a configuration which serves nothing does not import a web server.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "AgentWorkflow": "tandem.serve.agent",
    "Gateway": "tandem.serve.gateway",
    "Session": "tandem.serve.session",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'tandem.serve' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__
