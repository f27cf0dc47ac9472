"""The rollout executor: many episodes at once in one background thread, a plain face for callers.

Two sides share one lock::

    caller's thread                               rollout thread (``loop``)
    ---------------                               -------------------------
    submit, prepare_batch: put episodes in queue  takes: queued episodes, as capacity allows
    wait, prepare_batch: take ready episodes      makes: ready, rejected or failed episodes
    waits for: enough ready episodes              waits for: generation and rewards
    unblocked by: an episode that ends            unblocked by: submit, a freed place, resume

Transitions of episodes are in ``pipeline``; which may start or be trained on is asked of the ledger
(``staleness``); prompts come from ``feed``; evaluation is in ``direct``. With a trajectory store an
episode is ready when its rows are kept there, which a third thread sees to (``journal``). Every
wait has a deadline, and ``describe`` prints what it is waiting for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from tandem.config.schema import RolloutConfig
from tandem.errors import DataError, EngineError, RolloutError, WeightSyncError
from tandem.rollout.direct import DirectBatch
from tandem.rollout.feed import PromptFeed, PromptStream
from tandem.rollout.loop import EpisodeLoop
from tandem.rollout.pacing import HoldBudget
from tandem.rollout.pipeline import Pipeline
from tandem.rollout.runtime import Runtime
from tandem.rollout.snapshot import RolloutSnapshot, RunningEpisode
from tandem.rollout.workflow import EpisodeListener, RolloutWorkflow
from tandem.store import StoreWriter
from tandem.types import EpisodeState

if TYPE_CHECKING:
    from tensordict import TensorDict

    from tandem.rollout.engine import EpisodeData, InferenceEngine, ShouldAccept
    from tandem.rollout.staleness import StalenessLedger

NUM_SHOWN = 3
"""How many of the longest running episodes a description names."""


class RolloutExecutor:
    """Runs episodes against an engine. Thread-safe; states and staleness as in ``StalenessLedger``.

    ``version`` returns the version that serves now. ``hold_generation`` is entered around the start
    of a whole batch, so that no forward pass happens before all of it is enqueued. ``on_episode``
    is told of every attempt that ended, from the rollout thread. ``writer`` keeps episodes and the
    schedule in its store; without one they live in memory only. ``runtime``: threads and real time,
    unless a simulation brings its own.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        config: RolloutConfig,
        *,
        version: Callable[[], int],
        hold_generation: Callable[[], AbstractContextManager[None]] = nullcontext,
        on_episode: EpisodeListener | None = None,
        writer: StoreWriter | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        self._config = config
        self._version = version
        self._hold_generation = hold_generation
        self._loop = EpisodeLoop(
            engine,
            on_episode,
            temperature=config.generation.training_temperature,
            runtime=runtime,
        )
        self._now = self._loop.now
        self._lock = self._loop.lock
        self._pipeline = Pipeline(config, self._loop, version, writer)
        self._feed = PromptFeed()
        self._resumed_version = 0
        self._num_direct_batches = 0
        self._num_asleep = 0
        self._budget = HoldBudget() if config.stale_policy == "pace" else None
        self._waiting: tuple[str, float] | None = None

    def start(self) -> None:
        """Start the rollout thread. Idempotent."""
        self._loop.start()

    def close(self) -> None:
        """Cancel every episode and end the thread; waits end with ``EngineError``. Idempotent."""
        self._loop.close()

    @property
    def loop(self) -> EpisodeLoop:
        """For the engine: which attempt a request belongs to, and what it did."""
        return self._loop

    @property
    def ledger(self) -> StalenessLedger:
        return self._pipeline.ledger

    def open_ids(self) -> list[int]:
        """Episodes that are not final, in order of submission."""
        with self._lock:
            return list(self._pipeline.runs)

    # --- submitting and collecting ----------------------------------------------------------------

    def submit(
        self, data: EpisodeData, workflow: RolloutWorkflow, *, attempt: int | None = None
    ) -> int:
        """Enqueue one episode. An open episode of the same id is superseded by this attempt."""
        return self._pipeline.add(data, workflow, attempt)

    def wait(
        self, count: int, timeout: float | None = None, should_accept: ShouldAccept | None = None
    ) -> TensorDict:
        """Rows of the first ``count`` accepted episodes, oldest version first; see the contract."""
        if count < 1:
            raise DataError(f"wait: count is {count}, allowed: an integer >= 1")
        deadline = self._deadline(timeout)
        with self._lock:
            before = self._pipeline.use_filter(should_accept)
            try:
                while (batch := self._collect(count, hold=False)) is None:
                    self._require_reachable(count)
                    self._sleep_until(deadline, count, f"wait({count})")
            finally:
                self._pipeline.use_filter(before)
        return batch

    def prepare_batch(
        self,
        source: PromptStream,
        workflow: RolloutWorkflow,
        should_accept: ShouldAccept | None = None,
    ) -> TensorDict:
        """One training batch, with the queue kept full from ``source``.

        With ``stale_policy=wait`` the batch waits for running episodes that would expire otherwise
        (``StalenessLedger.select``), with ``pace`` for as long as its ``HoldBudget`` allows; with
        the others it is handed over as soon as it is full. What is too old by then is dropped or
        masked, and counted.
        """
        deadline = self._deadline(None)
        size = self._config.batch_size
        budget = self._budget
        with self._lock:
            self._require_weights()
            self._pipeline.use_filter(should_accept)
        is_exhausted = False
        while True:
            with self._lock:
                wanted = 0 if is_exhausted else self._wanted()
            # First, also when a batch is ready: else the generator runs dry while it is trained on.
            is_exhausted = is_exhausted or self._fill(source, workflow, wanted) < wanted
            with self._lock:
                hold = budget is None and self._config.stale_policy == "wait"
                hold = hold or (budget is not None and budget.may_hold(self._now()))
                if (batch := self._collect(size, hold=hold)) is not None:
                    if budget is not None:
                        budget.handed_over(self._now())
                    return batch
                held_until = deadline
                if budget is not None and self.ledger.count(EpisodeState.READY) >= size:
                    held_until = min(deadline, budget.hold(self._now()))
                if not is_exhausted and self._wanted() > 0:
                    continue
                self._require_reachable(size, more_to_come=not is_exhausted)
                self._sleep_until(deadline, size, f"prepare_batch of {size}", held_until)

    def _require_weights(self) -> None:
        if self._version() < self._resumed_version:
            raise EngineError(
                f"resumed at version {self._resumed_version}, but the engine serves version "
                f"{self._version()}; publish the trainer's weights before the first batch"
            )

    def _wanted(self) -> int:
        """How many prompts to take from the source now.

        Beyond what may start at once, an asynchronous run keeps one batch queued, so that places
        freed while the trainer is busy are taken at once. A synchronous one must not: what starts
        then would share the engine with whatever the caller does between two batches. After
        rejections in a row there are never more under way than may still be rejected.
        """
        config, ledger = self._config, self.ledger
        ahead = config.batch_size if config.max_staleness > 0 else 0
        queued = ledger.count(EpisodeState.QUEUED)
        wanted = ledger.staleness_room() + ahead - queued
        rejected = self._pipeline.faults.rejected_in_row
        left = config.max_rejected_in_row - rejected
        if rejected > 0 and left < config.batch_size:
            wanted = min(wanted, left - queued - ledger.count(EpisodeState.RUNNING))
        return max(0, wanted)

    def _fill(self, source: PromptStream, workflow: RolloutWorkflow, count: int) -> int:
        """Submit up to ``count`` prompts; fewer at the end of a source."""
        if count == 0:
            return 0
        items = self._feed.take(source, count)
        # Under one lock: else the rollout thread takes them one by one.
        with self._whole_batch_first(self._config.max_staleness == 0), self._lock:
            for item, attempt in items:
                self.submit(item, workflow, attempt=attempt)
        return len(items)

    def _collect(self, count: int, *, hold: bool) -> TensorDict | None:
        self._raise_if_broken()
        return self._pipeline.collect(count, hold=hold)

    def _require_reachable(self, count: int, *, more_to_come: bool = False) -> None:
        reachable = self.ledger.reachable(more_to_come=more_to_come)
        if reachable < count:
            raise RolloutError(
                f"{count} episodes can no longer be reached: at most {reachable} more can be "
                "handed over before the next version. Submit more, or end the batch in training "
                f"with set_version.\n{self.describe()}"
            )

    def _raise_if_broken(self) -> None:
        """Raise what was fatal, or ``RolloutError`` when a budget is spent (it starts anew)."""
        self._loop.raise_if_broken()
        faults = self._pipeline.faults
        if faults.is_spent:
            error = faults.error(self.describe())
            faults.accepted()
            self._pipeline.wake()
            raise error

    def _deadline(self, timeout: float | None) -> float:
        return self._now() + (self._config.wait_timeout_s if timeout is None else timeout)

    def _sleep_until(
        self, deadline: float, count: int, what: str, at_most: float = float("inf")
    ) -> None:
        """Sleep until ``count`` episodes may be ready, or cannot be, or it is ``at_most``.

        Nothing is lost when this raises.
        """
        remaining = deadline - self._now()
        if remaining <= 0:
            raise TimeoutError(f"{what} ran out of time\n{self.describe()}")
        with self._waits_for(what, deadline):
            self._num_asleep += 1
            self._pipeline.await_ready(count if self._num_asleep == 1 else 0)
            try:
                self._loop.enough.wait(max(0.0, min(remaining, at_most - self._now())))
            finally:
                self._num_asleep -= 1
                self._pipeline.await_ready(0 if self._num_asleep else None)

    @contextmanager
    def _waits_for(self, what: str, deadline: float) -> Iterator[None]:
        self._waiting = (what, deadline)
        try:
            yield
        finally:
            self._waiting = None

    # --- outside the ledger -----------------------------------------------------------------------

    def rollout_batch(self, data: Sequence[EpisodeData], workflow: RolloutWorkflow) -> TensorDict:
        """Run all episodes at once, also while paused; rows of those that ended well, in order.

        Failed and rejected episodes are reported to the listeners and leave no rows.

        Raises:
            RolloutError: none ended well, or the fault budget is spent.
        """
        with self._lock:
            self._loop.raise_if_broken()
            self._num_direct_batches += 1
            name = f"direct{self._num_direct_batches}"
        batch = DirectBatch(self._loop, data, workflow, config=self._config, name=name)
        try:
            with self._waits_for(f"rollout_batch of {len(data)}", batch.deadline):
                with self._whole_batch_first(True):
                    self._loop.call_soon(batch.launch)
                return batch.result()
        finally:
            batch.abandon()

    def _whole_batch_first(self, enabled: bool) -> AbstractContextManager[None]:
        if not enabled:
            return nullcontext()
        return self._loop.whole_batch_first(self._hold_generation, self._config.wait_timeout_s)

    # --- versions, pausing, trainer's rejections --------------------------------------------------

    def set_version(self, version: int) -> None:
        """Close the batch in training: consumed. ``WeightSyncError`` if ``version`` is not served.

        Frees its places, so an asynchronous run starts queued episodes at once.
        """
        with self._lock:
            serving = self._version()
            if version != serving:
                raise WeightSyncError(
                    f"set_version({version}): the engine serves version {serving}; commit the "
                    "weights first"
                )
            self._pipeline.consume(version)

    def reject(self, episode_ids: Collection[int], reason: str) -> None:
        """Drop ready episodes or episodes in training; their places are free again."""
        with self._lock:
            self._pipeline.reject(episode_ids, reason)

    def pause(self) -> None:
        """Start no more queued episodes; running ones go on and can be collected."""
        with self._lock:
            self._pipeline.is_paused = True

    def resume(self) -> None:
        with self._lock:
            self._pipeline.is_paused = False
            self._pipeline.wake()

    # --- what can be seen and saved ---------------------------------------------------------------

    def take_metrics(self) -> dict[str, float]:
        """Staleness of the batch last handed over; counts since the last call; queue depths."""
        with self._lock:
            return self._pipeline.meters.take(self.ledger.counts(), self._loop.num_late)

    def snapshot(self, patience_s: float = -1.0) -> RolloutSnapshot:
        """How things stand now.

        Raises:
            TimeoutError: another thread holds the lock for longer than ``patience_s``.
        """
        if not self._lock.acquire(timeout=patience_s):
            raise TimeoutError(f"a thread holds the executor's lock for over {patience_s:g} s")
        try:
            now = self._now()
            ledger, queue = self.ledger, self._pipeline.queue
            running = sorted(self._loop.active, key=lambda run: run.started_at or now)
            waiting, deadline = self._waiting or (None, None)
            return RolloutSnapshot(
                version=self._version(),
                is_paused=self._pipeline.is_paused,
                capacity=ledger.capacity(),
                max_concurrent=ledger.max_running,
                max_staleness=ledger.max_staleness,
                batch_size=ledger.batch_size,
                states=ledger.counts(),
                queued_for_s=now - queue[0].queued_at if queue else None,
                running=tuple(
                    RunningEpisode(run.name, now - (run.started_at or now), run.timeout_s)
                    for run in running[:NUM_SHOWN]
                ),
                num_running=len(running),
                num_ended=self._loop.num_ended,
                num_unkept=ledger.num_unkept,
                waiting=waiting,
                waits_until_s=None if deadline is None else deadline - now,
                last_failure=self._pipeline.faults.last_reason,
            )
        finally:
            self._lock.release()

    def describe(self) -> str:
        """What is queued, running and ready, since when, and why nothing more starts."""
        return self.snapshot().describe()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs, as plain JSON.

        ``open_episodes`` are (id, attempt to run): everything of the prompt stream that was
        submitted and not consumed, in order of submission. Episodes of plain mappings cannot be
        run again from an id and are left to who submitted them. When this returns, the trajectory
        store holds durably whatever the state leaves out.
        """
        with self._lock:
            reruns = [list(item) for item in self._feed.reruns]
            state = {
                "feed": self._feed.state_dict(),
                "open_episodes": self._pipeline.open_episodes() + reruns,
                "version": self._version(),
                "next_free_id": self._pipeline.next_free_id,
                "ledger": self.ledger.state_dict(),
            }
        self._pipeline.journal.sync()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: open episodes run again first, with the seeds they had.

        In an asynchronous run those whose rows the store holds, none newer than the checkpoint, are
        taken from it instead. A synchronous run makes its batches again as a whole, bit for bit.

        Raises:
            RolloutError: episodes were submitted already.
        """
        with self._lock:
            if self.ledger.submitted:
                raise RolloutError(
                    f"load_state_dict: {self.ledger.submitted} episodes were submitted already; "
                    "load into a fresh engine"
                )
        reruns = {int(key): int(attempt) for key, attempt in state["open_episodes"]}
        reuse = self._config.max_staleness > 0
        attempts = self._pipeline.journal.rewind(state, list(reruns), reuse=reuse)
        with self._lock:
            self.ledger.load_state_dict(state["ledger"])
            self._feed.load_state_dict(
                state["feed"],
                [(key, max(attempt, attempts.get(key, 0))) for key, attempt in reruns.items()],
            )
            self._pipeline.number_attempts(attempts)
            self._pipeline.next_free_id = int(state["next_free_id"])
            self._resumed_version = int(state["version"])
            self._pipeline.meters.start_from(self.ledger.counts())
