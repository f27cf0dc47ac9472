"""How rollout stands at one moment: plain data for the status file, and the words for a person.

No torch: ``tandem status`` reads this without loading anything heavy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RunningEpisode:
    """An attempt that runs: its name, for how long, and how long it may."""

    name: str
    age_s: float
    timeout_s: float


@dataclass(frozen=True, slots=True)
class RolloutSnapshot:
    """``capacity`` episodes may start now; ``states`` counts all that were ever submitted.

    ``running`` has the oldest few of ``num_running``, evaluation included; ``num_ended`` have ended
    so far, of which the store has yet to keep ``num_unkept``. ``waiting`` says in what the caller
    waits, None: in nothing here.
    """

    version: int
    is_paused: bool
    capacity: int
    max_concurrent: int
    max_staleness: int
    batch_size: int
    states: Mapping[str, int]
    queued_for_s: float | None
    running: tuple[RunningEpisode, ...]
    num_running: int
    num_ended: int
    waiting: str | None
    waits_until_s: float | None
    last_failure: str
    num_unkept: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RolloutSnapshot:
        running = tuple(RunningEpisode(**item) for item in data["running"])
        return cls(**{**data, "running": running})

    def describe(self) -> str:
        """What is queued, running and ready, since when, and why nothing more starts."""
        states = ", ".join(f"{name} {count}" for name, count in self.states.items() if count)
        lines = [
            f"rollout at version {self.version}" + (", paused" if self.is_paused else ""),
            f"capacity {self.capacity}: concurrency {self.max_concurrent}, staleness "
            f"({self.max_staleness} + 1) * {self.batch_size}",
            f"states: {states or 'no episodes'}",
        ]
        if self.num_unkept:
            lines.append(f"running, but over: {self.num_unkept} that the store has yet to keep")
        if self.waiting is not None:
            lines.append(f"the caller waits in {self.waiting}, for {self.waits_until_s:.0f} s more")
        if self.queued_for_s is not None:
            lines.append(f"queued for {self.queued_for_s:.1f} s: head of the queue")
        lines += [
            f"running for {run.age_s:.1f} of {run.timeout_s:g} s: {run.name}"
            for run in self.running
        ]
        if self.last_failure:
            lines.append(f"last failure: {self.last_failure}")
        return "\n".join(lines)
