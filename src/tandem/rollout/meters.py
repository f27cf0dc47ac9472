"""Numbers of the executor for ``metrics.jsonl``: counts since they were last taken, queue depths.

What is counted is the ledger's matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tandem.rollout.rows import Staleness

_TOTALS = {
    "staleness/dropped": "stale",
    "rollout/rejected": "rejected",
    "rollout/failed": "failed",
    "rollout/superseded": "superseded",
}
_DEPTHS = ("queued", "running", "ready")


class Meters:
    """What was handed over last, and what was told already."""

    def __init__(self) -> None:
        self._staleness = Staleness(0, 0.0, 0)
        self._masked_tokens = 0
        self._told: Counter[str] = Counter()

    def handed_over(self, staleness: Staleness) -> None:
        self._staleness = staleness
        self._masked_tokens += staleness.masked_tokens

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
        return metrics
