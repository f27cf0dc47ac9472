"""The trainers, for the verbs that train: imported once a configuration is known to be right."""

from __future__ import annotations

import gc
from types import ModuleType


def import_trainers() -> ModuleType:
    """``tandem.trainers``, and torch with it."""
    from tandem import trainers

    # What is imported is never garbage, and looking for it cost a sixth of a small episode.
    gc.collect()
    gc.freeze()
    return trainers
