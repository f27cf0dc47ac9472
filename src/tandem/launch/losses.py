"""Losses and hooks by name: what the first rank says instead of sending a function.

The formulas are in ``algorithms``. Whatever is to run on several ranks has a line here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tandem.algorithms.distillation import Likeliest
from tandem.algorithms.objective import PolicyObjective
from tandem.algorithms.preference_objective import KTOObjective, PairObjective, RewardObjective
from tandem.algorithms.sft import sft_loss
from tandem.algorithms.value import ValueObjective
from tandem.errors import CapabilityError

CLASSES: dict[str, Callable[..., Any]] = {
    "policy": PolicyObjective,
    "value": ValueObjective,
    "pairs": PairObjective,
    "kto": KTOObjective,
    "reward": RewardObjective,
    "likeliest": Likeliest,
}
"""Dataclasses whose fields are JSON."""

FUNCTIONS: dict[str, Any] = {"sft": sft_loss}


def to_json(function: Any) -> dict[str, Any] | None:
    """Name and parameters of a loss or hook.

    Raises:
        CapabilityError: it has no name.
    """
    if function is None:
        return None
    for name, known in FUNCTIONS.items():
        if function is known:
            return {"name": name}
    for name, kind in CLASSES.items():
        if type(function) is kind:
            return {"name": name, "parameters": dataclasses.asdict(function)}
    found = getattr(function, "__qualname__", type(function).__qualname__)
    raise CapabilityError(
        f"loss_fn: got {found}, which has no name to tell other ranks; known: "
        f"{', '.join((*FUNCTIONS, *CLASSES))} (a table in tandem.launch.losses)"
    )


def from_json(named: Mapping[str, Any] | None) -> Any:
    """The inverse of ``to_json``."""
    if named is None:
        return None
    if named["name"] in FUNCTIONS:
        return FUNCTIONS[named["name"]]
    return CLASSES[named["name"]](**named["parameters"])
