"""What is being checked, and how close to the truth it must come.

The tolerances are those of the kit's documentation; nothing else says how close is close enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

ModelType = Literal["language_model", "value_model", "reward_model"]

OUTPUT: dict[str, str] = {
    "language_model": "train_logprobs",
    "value_model": "values",
    "reward_model": "scores",
}
"""The output that the losses of a model type look at."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest differences allowed.

    ``output`` is absolute (log-probabilities, entropies, values, scores); ``loss`` relative to the
    magnitudes it is summed from, absolute where these are below 1; ``gradient`` is that of an
    element relative to the norm of the whole gradient; ``weight`` is the norm of the difference
    after a few optimizer steps, relative to how far the steps went.
    """

    output: float
    loss: float
    gradient: float
    weight: float


TOLERANCES = {
    "float32": Tolerance(output=1e-5, loss=1e-6, gradient=1e-5, weight=1e-4),
    "bfloat16": Tolerance(output=0.15, loss=3e-2, gradient=2e-2, weight=0.1),
}


@dataclass(frozen=True, slots=True)
class Subject:
    """A backend with the options it is checked with; ``train`` holds changes to ``TrainConfig``."""

    backend: str
    model_type: ModelType = "language_model"
    world: int = 1
    lora: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    train: Mapping[str, Any] = field(default_factory=dict)

    @property
    def output(self) -> str:
        return OUTPUT[self.model_type]

    @property
    def tolerance(self) -> Tolerance:
        return TOLERANCES[self.dtype]

    def degree(self, axis: str) -> int:
        """Ranks along an axis of ``train.parallel``; 1 where it is not set."""
        return int(self.train.get("parallel", {}).get(axis, 1))

    def __str__(self) -> str:
        parts = [self.backend, self.model_type, f"world {self.world}", self.dtype, self.device]
        if self.lora:
            parts.append("LoRA")
        return ", ".join(parts + [f"{key}={value}" for key, value in self.train.items()])
