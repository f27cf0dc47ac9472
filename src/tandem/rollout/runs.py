"""One attempt at an episode while the executor holds it, and what is counted over attempts."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tandem.errors import CapabilityError, ConfigError, RolloutError
from tandem.rollout.rows import EpisodeRows, RowFacts
from tandem.rollout.workflow import Episode, OverlongPromptError, RolloutWorkflow
from tandem.store.records import Content, EpisodeRecord
from tandem.types import EPISODE_STRIDE, EpisodeState

FATAL = (KeyboardInterrupt, SystemExit, ConfigError, CapabilityError, OverlongPromptError)
"""Raised by one episode, these would be raised by all: the waiting caller gets them as they are."""

FIRST_FREE_ID = EPISODE_STRIDE << 22
"""Ids of episodes that are not of a prompt stream start here, above every (epoch, position)."""


Outcome = tuple[EpisodeState, str | None]
Settle = Callable[["Run", BaseException | None], Outcome]
"""Called under the lock when an attempt ends; returns the state and the reason to report."""


@dataclass(slots=True, eq=False)
class Run:
    """An attempt. ``settled`` as soon as its outcome is decided; what comes later is ignored.

    ``settle`` decides it, ``reported`` is called after the listeners were told.
    ``key`` is that of the trajectory store once it is there; with ``is_stored`` it was there before
    and need not run. ``spans`` are seconds since the attempt began.
    """

    episode: Episode
    workflow: RolloutWorkflow
    order: int
    timeout_s: float
    queued_at: float
    started_at: float | None = None
    task: asyncio.Task[EpisodeRows | None] | None = None
    settle: Settle | None = None
    reported: Callable[[Run], None] | None = None
    started_version: int = 0
    rows: EpisodeRows | None = None
    facts: RowFacts | None = None
    spans: list[dict[str, Any]] = field(default_factory=list)
    key: int | None = None
    is_stored: bool = False
    settled: bool = False
    has_requested: bool = False
    judged_by: Any = None

    @property
    def episode_id(self) -> int:
        return self.episode.episode_id

    @property
    def name(self) -> str:
        return f"episode {self.episode_id} attempt {self.episode.attempt}"

    def content(self, rows: bytes | None) -> Content:
        """What the trajectory store keeps beside states and times."""
        notes = self.episode.notes
        return Content(
            prompt=notes.get("prompt"),
            completions=tuple(notes.get("completions", ())),
            rewards=self._rewards(),
            spans=(*self.spans, *notes.get("spans", ())),
            rows=rows,
        )

    def _rewards(self) -> tuple[float | None, ...]:
        noted = self.episode.notes.get("rewards")
        if noted is None:
            noted = [] if self.rows is None else self.rows.tensors["rewards"].tolist()
        return tuple(None if reward is None or reward != reward else reward for reward in noted)

    def record(self, state: EpisodeState, reason: str | None, now: float) -> EpisodeRecord:
        notes, rows = self.episode.notes, self.rows
        started = now if self.started_at is None else self.started_at
        return EpisodeRecord(
            episode_id=self.episode_id,
            attempt=self.episode.attempt,
            training=self.episode.training,
            state=state,
            reason=reason,
            prompt=notes.get("prompt"),
            completions=tuple(notes.get("completions", ())),
            rewards=self._rewards(),
            versions=() if rows is None else _version_ranges(rows),
            queued_s=started - self.queued_at,
            running_s=now - started,
        )


def _version_ranges(rows: EpisodeRows) -> tuple[tuple[int, int] | None, ...]:
    made = [row[row >= 0] for row in rows.tensors["versions"]]
    return tuple((int(row.min()), int(row.max())) if row.numel() else None for row in made)


@dataclass(slots=True)
class FaultBudget:
    """Failures and rejections in a row; an episode that is accepted starts both counts again."""

    max_failures: int
    max_rejected: int
    failed_in_row: int = 0
    rejected_in_row: int = 0
    first_traceback: str = ""
    last_reason: str = ""
    rejections: dict[str, int] = field(default_factory=dict)

    def accepted(self) -> None:
        self.failed_in_row = self.rejected_in_row = 0
        self.first_traceback = ""
        self.rejections.clear()

    def rejected(self, reason: str) -> None:
        self.failed_in_row = 0
        self.first_traceback = ""
        self.rejected_in_row += 1
        self.rejections[reason] = self.rejections.get(reason, 0) + 1

    def failed(self, error: BaseException) -> None:
        self.failed_in_row += 1
        self.last_reason = describe_error(error)
        if not self.first_traceback:
            self.first_traceback = "".join(traceback.format_exception(error)).strip()

    @property
    def is_spent(self) -> bool:
        return self.failed_in_row >= self.max_failures or self.rejected_in_row >= self.max_rejected

    def error(self, state: str) -> RolloutError:
        """What a caller gets when the budget is spent; ``state`` says how things stand."""
        if self.failed_in_row >= self.max_failures:
            return RolloutError(
                f"{self.failed_in_row} episodes failed in a row (rollout.max_failures_in_row); "
                f"the last: {self.last_reason}\n{state}\nThe first of them:\n"
                f"{self.first_traceback}"
            )
        return RolloutError(
            f"no informative group: {self.rejected_in_row} episodes were rejected in a row "
            f"(rollout.max_rejected_in_row), by reason: {self.rejections}; the task may be too "
            f"easy or too hard for this model\n{state}"
        )


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
