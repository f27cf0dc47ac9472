"""TrainEngines: the contract, the registry of backends, and the local backend.

Losses and data loading do not belong here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.train.engine import TrainEngine as TrainEngine
    from tandem.train.fsdp import FSDPTrainEngine as FSDPTrainEngine
    from tandem.train.local import LocalTrainEngine as LocalTrainEngine
    from tandem.train.registry import EngineRegistry as EngineRegistry

_EXPORTS = {
    "EngineRegistry": "tandem.train.registry",
    "FSDPTrainEngine": "tandem.train.fsdp",
    "LocalTrainEngine": "tandem.train.local",
    "TrainEngine": "tandem.train.engine",
}

__all__ = ["EngineRegistry", "FSDPTrainEngine", "LocalTrainEngine", "TrainEngine"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'tandem.train' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
