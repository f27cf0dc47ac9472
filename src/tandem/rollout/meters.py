"""Numbers of the executor for ``metrics.jsonl``: counts since they were last taken, queue depths.

What is counted is the ledger's matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tandem.rollout.rows import RowFacts, Staleness

_TOTALS = {
    "staleness/dropped": "stale",
    "rollout/rejected": "rejected",
    "rollout/failed": "failed",
    "rollout/superseded": "superseded",
}
_DEPTHS = ("queued", "running", "ready")
_MEMORY = 0.99
"""What counts of lengths keep of themselves from batch to batch: about the last hundred count."""


@dataclass(slots=True)
class LengthBias:
    """Whether long answers lose tokens on their way to training: token-weighted mean lengths.

    ``bias`` is (sum over trained tokens of the length of their answer / trained tokens) over (the
    same of all generated answers that were accepted), minus 1. Negative: long ones are lost.
    """

    generated: float = 0.0
    generated_lengths: float = 0.0
    trained: float = 0.0
    trained_lengths: float = 0.0

    def made(self, facts: RowFacts) -> None:
        self.generated += facts.num_trained
        self.generated_lengths += facts.squared_lengths

    def handed_over(self, staleness: Staleness) -> None:
        self.generated *= _MEMORY
        self.generated_lengths *= _MEMORY
        self.trained = self.trained * _MEMORY + staleness.trained_tokens
        self.trained_lengths = self.trained_lengths * _MEMORY + staleness.trained_lengths

    @property
    def bias(self) -> float | None:
        """None before there is something to compare."""
        if not self.generated_lengths or not self.trained:
            return None
        of_trained = self.trained_lengths / self.trained
        return of_trained * self.generated / self.generated_lengths - 1.0


class Meters:
    """What was handed over last, and what was told already."""

    def __init__(self) -> None:
        self.lengths = LengthBias()
        self._staleness = Staleness(0, 0.0, 0)
        self._masked_tokens = 0
        self._told: Counter[str] = Counter()

    def handed_over(self, staleness: Staleness) -> None:
        self._staleness = staleness
        self._masked_tokens += staleness.masked_tokens
        self.lengths.handed_over(staleness)

    def start_from(self, counts: Mapping[str, int]) -> None:
        """Counts of an earlier start were told by it."""
        self._told = Counter({name: counts[state] for name, state in _TOTALS.items()})

    def take(self, counts: Mapping[str, int], num_late: int) -> dict[str, float]:
        totals = Counter({name: counts[state] for name, state in _TOTALS.items()})
        totals["staleness/masked_tokens"] = self._masked_tokens
        totals["rollout/late"] = num_late
        metrics = {name: float(total - self._told[name]) for name, total in totals.items()}
        self._told = totals
        metrics |= {f"rollout/{state}": float(counts[state]) for state in _DEPTHS}
        metrics["staleness/max"] = float(self._staleness.max)
        metrics["staleness/mean"] = self._staleness.mean
        if (bias := self.lengths.bias) is not None:
            metrics["staleness/length_bias"] = bias
        return metrics
