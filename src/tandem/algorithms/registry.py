"""Losses by name, for callers that hold a name and JSON parameters. No formulas here."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

from tandem.algorithms.objective import PolicyObjective
from tandem.algorithms.preference_objective import KTOObjective, PairObjective, RewardObjective
from tandem.algorithms.sft import sft_loss
from tandem.algorithms.value import ValueObjective
from tandem.errors import ConfigError
from tandem.types import LossFn


def _sft() -> LossFn:
    return sft_loss


LOSSES: dict[str, Callable[..., LossFn]] = {
    "kto": KTOObjective,
    "policy": PolicyObjective,
    "preference": PairObjective,
    "reward": RewardObjective,
    "sft": _sft,
    "value": ValueObjective,
}


def get_loss(name: str, **params: Any) -> LossFn:
    """The loss called ``name`` with its parameters.

    Raises:
        ConfigError: unknown name or parameter.
    """
    if name not in LOSSES:
        close = difflib.get_close_matches(name, LOSSES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"loss: got {name!r}, allowed: {', '.join(LOSSES)}{hint}")
    allowed = inspect.signature(LOSSES[name]).parameters
    unknown = sorted(set(params) - set(allowed))
    if unknown:
        raise ConfigError(
            f"loss {name!r}: unknown parameter {unknown[0]!r}, "
            f"allowed: {', '.join(allowed) or 'none'}"
        )
    return LOSSES[name](**params)
