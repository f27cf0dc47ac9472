"""The rollout executor: many episodes at once in one background thread, a plain face for callers.

Two sides share one lock::

    caller's thread                               rollout thread (``loop``)
    ---------------                               -------------------------
    submit, prepare_batch: put episodes in queue  takes: queued episodes, as capacity allows
    wait, prepare_batch: take ready episodes      makes: ready, rejected or failed episodes
    waits for: enough ready episodes              waits for: generation and rewards
    unblocked by: an episode that ends            unblocked by: submit, a freed place, resume

Which episode may start or be trained on is asked of the ledger (``staleness``); rows are checked
and joined in ``rows``; prompts come from ``feed``; evaluation is in ``direct``. Every wait has a
deadline, and ``describe`` prints what it is waiting for.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from tandem.config.schema import RolloutConfig
from tandem.errors import DataError, EngineError, RolloutError, WeightSyncError
from tandem.rollout.direct import DirectBatch
from tandem.rollout.feed import PromptFeed, PromptStream
from tandem.rollout.loop import EpisodeLoop, Outcome
from tandem.rollout.rows import Staleness, join_rows, trained_versions
from tandem.rollout.runs import FIRST_FREE_ID, FaultBudget, Run, describe_error
from tandem.rollout.staleness import StalenessLedger
from tandem.rollout.workflow import Episode, EpisodeListener, RolloutWorkflow
from tandem.types import EpisodeState, Prompt

if TYPE_CHECKING:
    from tensordict import TensorDict

    from tandem.rollout.engine import EpisodeData, InferenceEngine, ShouldAccept


class RolloutExecutor:
    """Runs episodes against an engine. Thread-safe; states and staleness as in ``StalenessLedger``.

    ``version`` returns the version that serves now. ``hold_generation`` is entered around the start
    of a whole batch, so that no forward pass happens before all of it is enqueued. ``on_episode``
    is told of every attempt that ended, from the rollout thread.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        config: RolloutConfig,
        *,
        version: Callable[[], int],
        hold_generation: Callable[[], AbstractContextManager[None]] = nullcontext,
        on_episode: EpisodeListener | None = None,
    ) -> None:
        self._config = config
        self._version = version
        self._hold_generation = hold_generation
        self.ledger = StalenessLedger(
            max_concurrent=config.max_concurrent,
            max_staleness=config.max_staleness,
            batch_size=config.batch_size,
            stale_policy=config.stale_policy,
        )
        self._loop = EpisodeLoop(
            engine, on_episode, temperature=config.generation.training_temperature
        )
        self._lock = self._loop.lock
        self._feed = PromptFeed()
        self._queue: deque[Run] = deque()
        self._runs: dict[int, Run] = {}
        self._attempts: dict[int, int] = {}
        self._last_order = 0
        self._next_free_id = FIRST_FREE_ID
        self._resumed_version = 0
        self._num_direct_batches = 0
        self._faults = FaultBudget(config.max_failures_in_row, config.max_rejected_in_row)
        self._filter: ShouldAccept | None = None
        self._paused = False
        self._staleness = Staleness(0, 0.0, 0)
        self._masked_tokens = 0
        self._taken: Counter[str] = Counter()

    def start(self) -> None:
        """Start the rollout thread. Idempotent."""
        self._loop.start()

    def close(self) -> None:
        """Cancel every episode and end the thread; waits end with ``EngineError``. Idempotent."""
        self._loop.close()

    def note_request(self) -> None:
        """To be called by the engine at every request, in the task that makes it."""
        self._loop.note_request()

    # --- submitting -------------------------------------------------------------------------------

    def submit(
        self, data: EpisodeData, workflow: RolloutWorkflow, *, attempt: int | None = None
    ) -> int:
        """Enqueue one episode. An open episode of the same id is superseded by this attempt."""
        with self._lock:
            self._loop.raise_if_broken()
            episode_id = self._id_of(data)
            if (open_run := self._runs.get(episode_id)) is not None:
                self._supersede(open_run)
            if attempt is None:
                attempt = self._attempts.get(episode_id, -1) + 1
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
            run = Run(episode, workflow, self._last_order, timeout_s, time.monotonic())
            self._runs[episode_id] = run
            self._queue.append(run)
        self._loop.call_soon(self._start_admitted)
        return episode_id

    def _id_of(self, data: EpisodeData) -> int:
        if isinstance(data, Prompt):
            return data.episode_id
        self._next_free_id += 1
        return self._next_free_id - 1

    def _supersede(self, run: Run) -> None:
        if self.ledger.state_of(run.episode_id) is EpisodeState.IN_TRAINING:
            raise RolloutError(
                f"{run.name} is in training; call set_version before it is submitted again"
            )
        self.ledger.supersede(run.episode_id)
        self._forget(run)
        self._loop.abandon(run)

    def _forget(self, run: Run) -> None:
        """Drop a run whose episode is final, remembering its attempt in case it comes again."""
        self._attempts[run.episode_id] = run.episode.attempt
        del self._runs[run.episode_id]
        with contextlib.suppress(ValueError):
            self._queue.remove(run)

    # --- running (rollout thread) -----------------------------------------------------------------

    def _start_admitted(self) -> None:
        with self._lock:
            while self._queue and self.ledger.capacity() > 0:
                if self._paused or self._loop.fatal is not None or self._faults.is_spent:
                    break
                run = self._queue.popleft()
                self.ledger.start(run.episode_id, self._version())
                self._loop.launch(run, self._settle, _nothing_more)

    def _settle(self, run: Run, error: BaseException | None) -> Outcome:
        if error is not None:
            outcome = self._fail(run, error)
        elif run.rows is None:
            reason = str(run.episode.notes.get("reason", "the workflow returned None"))
            outcome = self._reject(run, reason)
        else:
            self.ledger.finish(run.episode_id, *trained_versions(run.rows))
            outcome = self._judge(run, self._filter)
        self._start_admitted()
        return outcome

    def _fail(self, run: Run, error: BaseException) -> Outcome:
        self.ledger.fail(run.episode_id)
        self._faults.failed(error)
        self._forget(run)
        return EpisodeState.FAILED, describe_error(error)

    def _reject(self, run: Run, reason: str) -> Outcome:
        self.ledger.reject(run.episode_id)
        self._faults.rejected(reason)
        self._forget(run)
        return EpisodeState.REJECTED, reason

    def _judge(self, run: Run, accept: ShouldAccept | None) -> Outcome:
        """Put a ready episode before a filter, once. A filter that raises fails the episode."""
        assert run.rows is not None
        run.judged_by = accept
        try:
            accepted = accept is None or bool(accept(run.rows))
        except Exception as error:
            return self._fail(run, error)
        if not accepted:
            return self._reject(run, "should_accept")
        self._faults.accepted()
        return EpisodeState.READY, None

    # --- collecting (caller's thread) -------------------------------------------------------------

    def wait(
        self, count: int, timeout: float | None = None, should_accept: ShouldAccept | None = None
    ) -> TensorDict:
        """Rows of the first ``count`` accepted episodes, oldest version first; see the contract."""
        if count < 1:
            raise DataError(f"wait: count is {count}, allowed: an integer >= 1")
        deadline = self._deadline(timeout)
        with self._lock:
            while True:
                if (batch := self._collect(count, should_accept, hold=False)) is not None:
                    return batch
                self._require_reachable(count)
                self._sleep_until(deadline, f"wait({count})")

    def prepare_batch(
        self,
        source: PromptStream,
        workflow: RolloutWorkflow,
        should_accept: ShouldAccept | None = None,
    ) -> TensorDict:
        """One training batch, with the queue kept full from ``source``.

        With ``stale_policy=wait`` the batch waits for running episodes that would expire otherwise
        (``StalenessLedger.select``); with the others it is handed over as soon as it is full. What
        is too old by then is dropped or masked, and counted.
        """
        deadline = self._deadline(None)
        size = self._config.batch_size
        hold = self._config.stale_policy == "wait"
        with self._lock:
            self._require_weights()
            self._filter = should_accept
        is_exhausted = False
        while True:
            with self._lock:
                if (batch := self._collect(size, should_accept, hold=hold)) is not None:
                    return batch
                wanted = 0 if is_exhausted else self._wanted()
                if wanted == 0:
                    self._require_reachable(size, more_to_come=not is_exhausted)
                    self._sleep_until(deadline, f"prepare_batch of {size}")
                    continue
            is_exhausted = self._fill(source, workflow, wanted) < wanted

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
        then would share the engine with whatever the caller does between two batches.
        """
        config = self._config
        ahead = config.batch_size if config.max_staleness > 0 else 0
        queued = self.ledger.count(EpisodeState.QUEUED)
        wanted = self.ledger.staleness_room() + ahead - queued
        left = config.max_rejected_in_row - self._faults.rejected_in_row
        if left < config.batch_size:
            wanted = min(wanted, left - queued - self.ledger.count(EpisodeState.RUNNING))
        return max(0, wanted)

    def _fill(self, source: PromptStream, workflow: RolloutWorkflow, count: int) -> int:
        """Submit up to ``count`` prompts; fewer at the end of a source."""
        if count == 0:
            return 0
        items = self._feed.take(source, count)
        with self._whole_batch_first(self._config.max_staleness == 0):
            for item, attempt in items:
                self.submit(item, workflow, attempt=attempt)
        return len(items)

    def _collect(
        self, count: int, should_accept: ShouldAccept | None, *, hold: bool
    ) -> TensorDict | None:
        """Hand over ``count`` ready episodes if there are that many which may be trained on."""
        self._raise_if_broken()
        version = self._version()
        for episode_id in self.ledger.expired(version):
            self.ledger.drop_stale(episode_id)
            self._forget(self._runs[episode_id])
            self._wake()
        for episode_id in self.ledger.ids(EpisodeState.READY):
            if should_accept is not None and self._runs[episode_id].judged_by is not should_accept:
                self._judge(self._runs[episode_id], should_accept)
                self._wake()
        self._raise_if_broken()
        chosen = self.ledger.select(count, version, hold=hold)
        return None if chosen is None else self._hand_over(chosen, version)

    def _hand_over(self, chosen: Sequence[int], version: int) -> TensorDict:
        runs = sorted((self._runs[key] for key in chosen), key=lambda run: run.order)
        rows = [run.rows for run in runs if run.rows is not None]
        limit = self._config.max_staleness
        batch, self._staleness = join_rows(rows, version=version, max_staleness=limit)
        assert self._staleness.max <= limit, (self._staleness, version, limit)
        self.ledger.hand_over(run.episode_id for run in runs)
        for run in runs:
            run.rows = None
        self._masked_tokens += self._staleness.masked_tokens
        return batch

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
        if self._faults.is_spent:
            error = self._faults.error(self.describe())
            self._faults.accepted()
            self._wake()
            raise error

    def _deadline(self, timeout: float | None) -> float:
        return time.monotonic() + (self._config.wait_timeout_s if timeout is None else timeout)

    def _sleep_until(self, deadline: float, what: str) -> None:
        """Sleep until something changes. Nothing that finished is lost when this raises."""
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError(f"{what} ran out of time\n{self.describe()}")
        self._lock.wait(remaining)

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
            for episode_id in self.ledger.consume():
                del self._runs[episode_id]
        self._wake()

    def reject(self, episode_ids: Collection[int], reason: str) -> None:
        """Drop ready episodes or episodes in training; their places are free again."""
        with self._lock:
            unknown = [key for key in episode_ids if key not in self._runs]
            if unknown:
                raise DataError(f"reject ({reason}): no open episodes with the ids {unknown}")
            for episode_id in episode_ids:
                self.ledger.reject(episode_id)
                self._forget(self._runs[episode_id])
        self._wake()

    def pause(self) -> None:
        """Start no more queued episodes; running ones go on and can be collected."""
        with self._lock:
            self._paused = True

    def resume(self) -> None:
        with self._lock:
            self._paused = False
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            if self._loop.is_running:
                self._loop.call_soon(self._start_admitted)

    # --- what can be seen and saved ---------------------------------------------------------------

    def take_metrics(self) -> dict[str, float]:
        """Staleness of the batch last handed over; counts since the last call; queue depths."""
        with self._lock:
            counts = self.ledger.counts()
            totals = Counter(
                {
                    "staleness/dropped": counts["stale"],
                    "staleness/masked_tokens": self._masked_tokens,
                    "rollout/rejected": counts["rejected"],
                    "rollout/failed": counts["failed"],
                    "rollout/superseded": counts["superseded"],
                    "rollout/late": self._loop.num_late,
                }
            )
            metrics = {name: float(total - self._taken[name]) for name, total in totals.items()}
            self._taken = totals
            metrics |= {
                f"rollout/{state}": float(counts[state]) for state in ("queued", "running", "ready")
            }
            metrics["staleness/max"] = float(self._staleness.max)
            metrics["staleness/mean"] = self._staleness.mean
            return metrics

    def describe(self) -> str:
        """What is queued, running and ready, since when, and why nothing more starts."""
        with self._lock:
            now = time.monotonic()
            lines = [
                f"rollout at version {self._version()}" + (", paused" if self._paused else ""),
                self.ledger.describe(),
            ]
            if self._queue:
                waited = now - self._queue[0].queued_at
                lines.append(f"queued for {waited:.1f} s: head of the queue")
            oldest = sorted(self._loop.active, key=lambda run: run.started_at or now)
            lines += [run.describe(now) for run in oldest[:3]]
            if self._faults.last_reason:
                lines.append(f"last failure: {self._faults.last_reason}")
            return "\n".join(lines)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs, as plain JSON.

        ``open_episodes`` are (id, attempt to run): everything of the prompt stream that was
        submitted and not consumed, in order of submission. Episodes of plain mappings cannot be
        run again from an id and are left to who submitted them.
        """
        with self._lock:
            reruns = [
                [run.episode_id, run.episode.attempt + (run.started_at is not None)]
                for run in self._runs.values()
                if run.episode_id < FIRST_FREE_ID
            ]
            return {
                "feed": self._feed.state_dict(),
                "open_episodes": reruns + [list(item) for item in self._feed.reruns],
                "version": self._version(),
                "next_free_id": self._next_free_id,
                "ledger": self.ledger.state_dict(),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: open episodes run again first, with the seeds they had.

        Raises:
            RolloutError: episodes were submitted already.
        """
        with self._lock:
            if self.ledger.submitted:
                raise RolloutError(
                    f"load_state_dict: {self.ledger.submitted} episodes were submitted already; "
                    "load into a fresh engine"
                )
            self.ledger.load_state_dict(state["ledger"])
            reruns = [(int(key), int(attempt)) for key, attempt in state["open_episodes"]]
            self._feed.load_state_dict(state["feed"], reruns)
            self._next_free_id = int(state["next_free_id"])
            self._resumed_version = int(state["version"])
            self._taken = Counter(
                {
                    "staleness/dropped": self.ledger.count(EpisodeState.STALE),
                    "rollout/rejected": self.ledger.count(EpisodeState.REJECTED),
                    "rollout/failed": self.ledger.count(EpisodeState.FAILED),
                    "rollout/superseded": self.ledger.count(EpisodeState.SUPERSEDED),
                }
            )


def _nothing_more(run: Run) -> None:
    """Episodes of the ledger need nothing after their listeners were told."""
