"""Who had nothing to do while generation and training ran at once: of a step, and of a run.

How long the parts of a step take is the loop's matter, how busy a generator is the backend's.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Bubble:
    """Sums over the steps of a run, in seconds; a share is None before there is anything to share.

    ``idle_s`` is that of the generator, out of ``watched_s``: steps in which it told.
    """

    step_s: float = 0.0
    wait_s: float = 0.0
    watched_s: float = 0.0
    idle_s: float = 0.0

    def add(self, *, step_s: float, wait_s: float, busy_s: float | None) -> dict[str, float]:
        """Count one step and return its shares as metrics.

        ``wait_s`` is how long the trainer waited for its batch, ``busy_s`` how long the generator
        had work, None where the backend does not say.
        """
        self.step_s += step_s
        self.wait_s += wait_s
        metrics = {"perf/trainer_wait_share": wait_s / step_s}
        if busy_s is not None:
            # The two clocks are read at slightly different moments.
            idle_s = min(step_s, max(0.0, step_s - busy_s))
            self.watched_s += step_s
            self.idle_s += idle_s
            metrics["perf/generator_idle_share"] = idle_s / step_s
        return metrics

    @property
    def trainer_wait_share(self) -> float | None:
        return self.wait_s / self.step_s if self.step_s else None

    @property
    def generator_idle_share(self) -> float | None:
        return self.idle_s / self.watched_s if self.watched_s else None
