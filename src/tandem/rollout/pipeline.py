"""The open episodes, from the queue to a training batch: what starts, what is ready, what is taken.

Every transition of an episode happens here and is told to the ledger, which allows it, and to the
journal, which keeps it. Waiting, deadlines and the callers' side are the executor's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from tandem.config.schema import RolloutConfig
from tandem.errors import DataError, RolloutError, TandemError
from tandem.observe.moments import reach
from tandem.rollout.journal import Journal
from tandem.rollout.loop import EpisodeLoop
from tandem.rollout.meters import Meters
from tandem.rollout.rows import check_rows, join_rows
from tandem.rollout.runs import FIRST_FREE_ID, FaultBudget, Outcome, Run, describe_error
from tandem.rollout.staleness import StalenessLedger
from tandem.rollout.workflow import Episode, RolloutWorkflow
from tandem.store import StoreWriter
from tandem.types import EpisodeState, Prompt

if TYPE_CHECKING:
    from tensordict import TensorDict

    from tandem.rollout.engine import EpisodeData, ShouldAccept


class Pipeline:
    """States of the open episodes and their rows. ``loop.lock`` guards all of it; methods take it
    unless they say that it is held."""

    def __init__(
        self,
        config: RolloutConfig,
        loop: EpisodeLoop,
        version: Callable[[], int],
        writer: StoreWriter | None,
    ) -> None:
        self.ledger = StalenessLedger(
            max_concurrent=config.max_concurrent,
            max_staleness=config.max_staleness,
            batch_size=config.batch_size,
            stale_policy=config.stale_policy,
        )
        self.faults = FaultBudget(config.max_failures_in_row, config.max_rejected_in_row)
        self.journal = Journal(
            writer, on_durable=self._become_ready, on_error=loop.set_fatal, now=loop.now
        )
        self.meters = Meters()
        self.queue: deque[Run] = deque()
        self.runs: dict[int, Run] = {}
        self.is_paused = False
        self._awaited: int | None = None
        self.next_free_id = FIRST_FREE_ID
        self._config = config
        self._loop = loop
        self._lock = loop.lock
        self._version = version
        self._attempts: dict[int, int] = {}
        self._last_order = 0
        self._filter: ShouldAccept | None = None
        self._is_start_due = False
        self._looked_at: int | None = None

    # --- into the queue (any thread) --------------------------------------------------------------

    def add(self, data: EpisodeData, workflow: RolloutWorkflow, attempt: int | None) -> int:
        """Enqueue one episode; an open episode of the same id is superseded by this attempt."""
        with self._lock:
            self._loop.raise_if_broken()
            episode_id = self._id_of(data)
            if (open_run := self.runs.get(episode_id)) is not None:
                self._supersede(open_run)
            if attempt is None:
                attempt = self._attempts.get(episode_id, -1) + 1
            if (stored := self.journal.take(episode_id)) is not None:
                attempt = stored.attempt
            self._attempts.pop(episode_id, None)
            self.ledger.submit(episode_id)
            episode = Episode(
                data.data if isinstance(data, Prompt) else data,
                episode_id=episode_id,
                attempt=attempt,
                uid=f"{episode_id}.{attempt}",
            )
            self._last_order += 1
            timeout_s = self._config.episode_timeout_s
            run = Run(episode, workflow, self._last_order, timeout_s, self._loop.now())
            if stored is not None:
                run.key, run.is_stored = stored.key, True
            self.runs[episode_id] = run
            self.queue.append(run)
            self.wake()
        return episode_id

    def _id_of(self, data: EpisodeData) -> int:
        if isinstance(data, Prompt):
            return data.episode_id
        self.next_free_id += 1
        return self.next_free_id - 1

    def _supersede(self, run: Run) -> None:
        if self.ledger.state_of(run.episode_id) is EpisodeState.IN_TRAINING:
            raise RolloutError(
                f"{run.name} is in training; call set_version before it is submitted again"
            )
        outcome = self._close(run, EpisodeState.SUPERSEDED, "submitted again")
        if not run.settled:
            self._loop.tell(run, outcome)
        self._loop.abandon(run)

    def _close(self, run: Run, state: EpisodeState, reason: str) -> Outcome:
        """Final without training: drop the run, remembering its attempt in case it comes again."""
        if self.ledger.state_of(run.episode_id) is EpisodeState.QUEUED:
            self.queue.remove(run)
        self.ledger.close(run.episode_id, state)
        self.journal.closed(run, state, reason, self._version())
        self._attempts[run.episode_id] = run.episode.attempt
        del self.runs[run.episode_id]
        self._loop.enough.notify_all()
        return state, reason

    # --- running (rollout thread) -----------------------------------------------------------------

    def wake(self) -> None:
        """Have the rollout thread start what is admitted, soon."""
        if self._is_start_due or not self.queue:  # what is due has yet to look at the queue
            return
        with self._lock:
            if self._loop.is_running and not self._is_start_due:
                self._is_start_due = True
                self._loop.call_soon(self._start_admitted)

    def _start_admitted(self) -> None:
        with self._lock:
            self._is_start_due = False
            version, begun = self._version(), []
            while self.queue and self.ledger.capacity() > 0:
                if self.is_paused or self._loop.fatal is not None or self.faults.is_spent:
                    break
                run = self.queue.popleft()
                self.ledger.start(run.episode_id, version)
                run.started_version = version
                if run.is_stored:
                    self._take_up(run)
                else:
                    begun.append(run)
            self.journal.dispatched(begun, version)
            for run in begun:
                self._loop.launch(run, self._settle, _nothing_more)

    def _take_up(self, run: Run) -> None:
        """An attempt that ran before the resume and whose rows are in the store."""
        try:
            stored = self.journal.load(run)
            run.rows, run.facts = check_rows(stored, run.episode_id, run.episode.attempt)
        except TandemError as error:
            self._loop.set_fatal(error)
            return
        run.started_at, run.settled = self._loop.now(), True
        if self._judge(run, self._filter)[0] is EpisodeState.READY:
            self._become_ready([run])

    def _settle(self, run: Run, error: BaseException | None) -> Outcome:
        if error is not None:
            outcome = self._fail(run, error)
        elif run.rows is None:
            reason = str(run.episode.notes.get("reason", "the workflow returned None"))
            outcome = self._reject(run, reason)
        else:
            outcome = self._judge(run, self._filter)
            if outcome[0] is EpisodeState.READY:
                self.ledger.end(run.episode_id)
                self.journal.ready(run)
                if self._num_made() == self._awaited:
                    self.journal.hurry()
        self.wake()
        return outcome

    def _become_ready(self, runs: Sequence[Run]) -> None:
        """Their rows are kept now. Called by the writing thread, or directly without a store."""
        with self._lock:
            for run in runs:
                if self.runs.get(run.episode_id) is run:
                    assert run.facts is not None
                    self.meters.lengths.made(run.facts)
                    trained = run.facts.trained_oldest, run.facts.trained_newest
                    self.ledger.finish(run.episode_id, *trained)
            self._lock.notify_all()
            if self.ledger.count(EpisodeState.READY) >= (self._awaited or 0):
                self._loop.enough.notify_all()

    def _fail(self, run: Run, error: BaseException) -> Outcome:
        self.faults.failed(error)
        return self._close(run, EpisodeState.FAILED, describe_error(error))

    def _reject(self, run: Run, reason: str) -> Outcome:
        self.faults.rejected(reason)
        return self._close(run, EpisodeState.REJECTED, reason)

    def _judge(self, run: Run, accept: ShouldAccept | None) -> Outcome:
        """Put an episode before a filter, once. A filter that raises fails the episode."""
        assert run.rows is not None
        run.judged_by = accept
        try:
            accepted = accept is None or bool(accept(run.rows.batch()))
        except Exception as error:
            return self._fail(run, error)
        if not accepted:
            return self._reject(run, "should_accept")
        if self.faults.rejected_in_row:  # a caller may have held prompts back until now
            self._loop.enough.notify_all()
        self.faults.accepted()
        return EpisodeState.READY, None

    # --- out of it (caller's thread, lock held) ---------------------------------------------------

    def use_filter(self, accept: ShouldAccept | None) -> ShouldAccept | None:
        """Put what is ready and what will be before ``accept``; returns the filter until now."""
        before, self._filter = self._filter, accept
        if accept is not None:
            for episode_id in self.ledger.ids(EpisodeState.READY):
                if self.runs[episode_id].judged_by is not accept:
                    self._judge(self.runs[episode_id], accept)
            self.wake()
        return before

    def await_ready(self, count: int | None) -> None:
        """A caller sleeps for ``count`` ready episodes, which fewer do not wake; None: nobody."""
        self._awaited = count
        if count is not None and self._num_made() >= count:
            self.journal.hurry()

    def _num_made(self) -> int:
        """Ready episodes, and those that will be as soon as they are kept."""
        return self.ledger.count(EpisodeState.READY) + self.ledger.num_unkept

    def collect(self, count: int, *, hold: bool) -> TensorDict | None:
        """Hand over ``count`` ready episodes if there are that many which may be trained on."""
        version = self._version()
        if self.ledger.count(EpisodeState.READY) < count and self._looked_at == version:
            return None
        self._looked_at = version
        for episode_id in self.ledger.expired(version):
            reason = f"older than {self._config.max_staleness} versions at version {version}"
            self._close(self.runs[episode_id], EpisodeState.STALE, reason)
            self.wake()
        chosen = self.ledger.select(count, version, hold=hold)
        return None if chosen is None else self._hand_over(chosen, version)

    def _hand_over(self, chosen: Sequence[int], version: int) -> TensorDict:
        runs = sorted((self.runs[key] for key in chosen), key=lambda run: run.order)
        rows = [run.rows for run in runs if run.rows is not None]
        limit = self._config.max_staleness
        batch, staleness = join_rows(rows, version=version, max_staleness=limit)
        assert staleness.max <= limit, (staleness, version, limit)
        self.ledger.hand_over(run.episode_id for run in runs)
        self.journal.handed_over(runs, version)
        for run in runs:
            run.rows = None
        self.meters.handed_over(staleness)
        reach("rollout.handed_over")
        return batch

    def consume(self, version: int) -> None:
        """The batch in training was trained on, which made ``version``."""
        reach("rollout.consuming")
        runs = [self.runs.pop(episode_id) for episode_id in self.ledger.consume()]
        self.journal.consumed(runs, version)
        reach("rollout.consumed")
        self._loop.enough.notify_all()
        self.wake()

    def reject(self, episode_ids: Collection[int], reason: str) -> None:
        """Drop ready episodes or episodes in training; all of them or, on an error, none."""
        unknown = [key for key in episode_ids if key not in self.runs]
        if unknown:
            raise DataError(f"reject ({reason}): no open episodes with the ids {unknown}")
        for episode_id in episode_ids:
            self._close(self.runs[episode_id], EpisodeState.REJECTED, reason)
        self.wake()

    # --- checkpoints (lock held) ------------------------------------------------------------------

    def open_episodes(self) -> list[list[int]]:
        """(id, attempt to run) of what can be run again from its id, in order of submission."""
        return [
            [run.episode_id, run.episode.attempt + (run.started_at is not None or run.is_stored)]
            for run in self.runs.values()
            if run.episode_id < FIRST_FREE_ID
        ]

    def number_attempts(self, attempts: Mapping[int, int]) -> None:
        """The attempt with which an episode begins when it comes from the stream again."""
        self._attempts = {key: attempt - 1 for key, attempt in attempts.items()}


def _nothing_more(run: Run) -> None:
    """Episodes of the ledger need nothing after their listeners were told."""
