"""How many episodes run at once so that tokens are young when they are trained on. Pure.

With every place of the staleness rule taken, most episodes wait in the queue of ready ones, and
that wait is what makes their tokens old. So as few run as keep the trainer from waiting: the bound
on places stays above it, for bursts. Which tokens are too old is ``staleness``'s.
"""

from __future__ import annotations

_GROWTH = 1.1
_DECAY = 0.97
_FAST_DECAY = 0.85
_HELD_SHARE = 0.06
_MOST_HELD = 0.5
_SPARE = 0.25
"""Of a batch: with more than that left when one is handed over, fewer need to run; with a whole one
left, far fewer."""


class Pacer:
    """A running limit between 1 and ``most``. It grows when a batch had to be waited for, and falls
    while ready episodes are left over; in between it stays.

    The growth is three times the decay: a step that waits costs more than a token that ages.
    """

    def __init__(self, most: int, batch_size: int) -> None:
        self._most = max(1, most)
        self._batch_size = batch_size
        self._limit = float(self._most)
        self._has_waited = False
        self._was_held = False

    @property
    def limit(self) -> int:
        return max(1, min(self._most, round(self._limit)))

    def starved(self) -> None:
        """A batch was asked for and there are not enough ready episodes."""
        self._has_waited = True

    def held(self) -> None:
        """A full batch waits for older episodes; what gets ready meanwhile says nothing."""
        self._was_held = True

    def served(self, left_ready: int) -> None:
        """A batch was handed over; ``left_ready`` episodes were not needed for it."""
        if self._has_waited:
            self._limit = min(float(self._most), self._limit * _GROWTH)
        elif not self._was_held and left_ready > _SPARE * self._batch_size:
            decay = _FAST_DECAY if left_ready >= self._batch_size else _DECAY
            self._limit = max(1.0, self._limit * decay)
        self._has_waited = self._was_held = False


class HoldBudget:
    """How long a full batch may be held for running episodes that would lose tokens to the next
    version: a share of all time, saved up for when it is worth something."""

    def __init__(self) -> None:
        self.left_s = 0.0
        self._last: float | None = None
        self._held_since: float | None = None

    def hold(self, now: float) -> float:
        """A batch is full and held; returns until when it may be."""
        if self._held_since is None:
            self._held_since = now
        return self._held_since + self.left_s

    def may_hold(self, now: float) -> bool:
        # The same sum as in ``hold``, so that a clock that stops there is not short of it by a bit.
        since = now if self._held_since is None else self._held_since
        return now < since + self.left_s

    def handed_over(self, now: float) -> None:
        """A batch was handed over: what it was held for is spent, what passed adds its share."""
        held_s = 0.0 if self._held_since is None else now - self._held_since
        passed_s = 0.0 if self._last is None else now - self._last
        earned = self.left_s - held_s + _HELD_SHARE * passed_s
        self.left_s = max(0.0, min(earned, passed_s * _MOST_HELD))
        self._last, self._held_since = now, None
