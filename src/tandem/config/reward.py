"""The section that says what scores a completion. How rewards run is in ``rollout/scoring``."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from tandem.config.section import NonNegativeFloat, PositiveFloat, PositiveInt, Section


class RewardPartConfig(Section):
    """One of several rewards that are added: any reward by name, but ``model``."""

    name: str
    kwargs: dict[str, Any] = {}


class RewardConfig(Section):
    """What scores a completion.

    ``name`` is ``auto`` (the data source's own scorer), ``model`` (0 here: the section
    ``reward_model`` of an RL run scores it), another built-in, ``path/to/file.py:function`` or
    ``package.module:function``; ``process`` runs it in child processes with a deadline.
    """

    name: str = "auto"
    kwargs: dict[str, Any] = {}
    parts: dict[str, RewardPartConfig] = Field(
        {}, description="instead of name: several rewards, each with a label, added with weights"
    )
    weights: dict[str, float] = Field(
        {},
        description="of parts, by label, where not 1; a function that returns a mapping of numbers "
        "needs all of its labels here",
    )
    per: Literal["completion", "group", "batch"] = Field(
        "completion", description="what one call sees; group: all completions of a prompt"
    )
    batch_size: PositiveInt = Field(64, description="completions of one call, with per=batch")
    batch_wait_s: NonNegativeFloat = Field(
        0.05, description="how long a batch is collected, with per=batch"
    )
    max_concurrent: PositiveInt | None = Field(None, description="calls at once; None: any number")
    process: bool = False
    workers: PositiveInt = 1
    timeout_s: PositiveFloat = 30.0
    memory_mb: PositiveInt | None = Field(
        None, description="address space of a child process; needs process=true"
    )
    cpu_s: PositiveFloat | None = Field(
        None, description="processor seconds of one call; needs process=true"
    )
    network: bool = Field(
        True, description="false: child processes have no network; needs process=true and Linux"
    )

    @model_validator(mode="after")
    def _limits_need_a_process(self) -> Self:
        limited = self.memory_mb is not None or self.cpu_s is not None or not self.network
        if limited and not self.process:
            raise ValueError("reward.memory_mb, cpu_s and network=false need reward.process=true")
        return self

    @model_validator(mode="after")
    def _algebra_needs_a_process(self) -> Self:
        if not self.process and "math" in {self.name, *(part.name for part in self.parts.values())}:
            raise ValueError("reward.name=math can take for ever; it needs reward.process=true")
        return self

    @model_validator(mode="after")
    def _parts_are_all(self) -> Self:
        if not self.parts:
            return self
        if self.name != "auto" or self.kwargs or self.per != "completion":
            raise ValueError(
                "reward.parts: leave reward.name, kwargs and per out; parts have names"
            )
        if any(part.name == "model" for part in self.parts.values()):
            raise ValueError("reward.parts: a reward model is no part; see reward_model.weight")
        if unknown := sorted(set(self.weights) - set(self.parts)):
            raise ValueError(
                f"reward.weights.{unknown[0]}: no such part, known: {', '.join(self.parts)}"
            )
        return self

    @property
    def part_weights(self) -> dict[str, float]:
        """The weight of each part by label, in order; empty for a reward of one number."""
        if self.parts:
            return {label: self.weights.get(label, 1.0) for label in self.parts}
        return self.weights
