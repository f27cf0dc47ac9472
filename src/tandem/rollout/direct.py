"""Episodes outside the ledger: a fixed list, run at once, returned in input order (evaluation)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tandem.config.schema import RolloutConfig
from tandem.errors import DataError, RolloutError
from tandem.rollout.loop import EpisodeLoop
from tandem.rollout.rows import join_rows
from tandem.rollout.runs import FIRST_FREE_ID, FaultBudget, Outcome, Run, describe_error
from tandem.rollout.workflow import Episode, RolloutWorkflow
from tandem.types import EpisodeState, Prompt

if TYPE_CHECKING:
    from tensordict import TensorDict

    from tandem.rollout.engine import EpisodeData


class DirectBatch:
    """One ``rollout_batch``. ``launch`` runs in the rollout thread, the rest in the caller's."""

    def __init__(
        self,
        loop: EpisodeLoop,
        data: Sequence[EpisodeData],
        workflow: RolloutWorkflow,
        *,
        config: RolloutConfig,
        name: str,
    ) -> None:
        if not data:
            raise DataError("rollout_batch: got no episodes, allowed: at least 1")
        self._loop = loop
        self._faults = FaultBudget(config.max_failures_in_row, max_rejected=len(data) + 1)
        self._num_failed = self._num_rejected = 0
        # All start together, so the deadline of a late one covers the waves before it.
        timeout_s = config.episode_timeout_s * -(-len(data) // config.max_concurrent)
        self.deadline = loop.now() + timeout_s + config.wait_timeout_s
        self._runs = [
            Run(_episode(item, index, name), workflow, index, timeout_s, loop.now())
            for index, item in enumerate(data)
        ]
        self._pending = set(self._runs)

    def launch(self) -> None:
        with self._loop.lock:
            for run in self._runs:
                self._loop.launch(run, self._settle, self._pending.discard)

    def _settle(self, run: Run, error: BaseException | None) -> Outcome:
        if error is not None:
            self._num_failed += 1
            self._faults.failed(error)
            return EpisodeState.FAILED, describe_error(error)
        if run.rows is None:
            self._num_rejected += 1
            reason = str(run.episode.notes.get("reason", "the workflow returned None"))
            self._faults.rejected(reason)
            return EpisodeState.REJECTED, reason
        self._faults.accepted()
        return EpisodeState.READY, None

    def result(self) -> TensorDict:
        """Wait for all. Episodes have deadlines of their own; this one is behind them."""
        with self._loop.lock:
            while self._pending:
                self._loop.raise_if_broken()
                if self._faults.is_spent:
                    raise RolloutError(self._complaint("the fault budget is spent"))
                remaining = self.deadline - self._loop.now()
                if remaining <= 0:
                    raise TimeoutError(self._complaint(f"{len(self._pending)} did not end in time"))
                self._loop.lock.wait(remaining)
            self._loop.raise_if_broken()
        rows = [run.rows for run in self._runs if run.rows is not None]
        if not rows:
            raise RolloutError(self._complaint("no episode ended well"))
        return join_rows(rows)[0]

    def _complaint(self, what: str) -> str:
        return (
            f"rollout_batch of {len(self._runs)}: {what}; {self._num_failed} failed "
            f"({self._faults.failed_in_row} in a row), {self._num_rejected} rejected "
            f"{self._faults.rejections or ''}\n{self._faults.first_traceback}"
        )

    def abandon(self) -> None:
        """Cancel what still runs; nothing does after a result."""
        with self._loop.lock:
            for run in self._runs:
                self._loop.abandon(run)


def _episode(item: EpisodeData, index: int, name: str) -> Episode:
    """A plain mapping gets an id by its place, so that its samples are the same in every call."""
    if isinstance(item, Prompt):
        data, episode_id = item.data, item.episode_id
    else:
        data, episode_id = item, FIRST_FREE_ID + index
    return Episode(data, episode_id=episode_id, uid=f"{name}.{index}", training=False)
