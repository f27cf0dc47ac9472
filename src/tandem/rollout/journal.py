"""What the executor tells the trajectory store, and what it gets back from it after a resume.

States are the ledger's, groups and threads the writer's. An engine without a store has a journal
that keeps nothing: an episode is then ready as soon as its run ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensordict import TensorDict

from tandem.errors import StoreError
from tandem.rollout.encoding import pack_rows, unpack_rows
from tandem.rollout.rows import NO_ROWS
from tandem.rollout.runs import FIRST_FREE_ID, Run
from tandem.store import Moved, Query, RewindPoint, StoredEpisode, StoreWriter
from tandem.store.records import Change
from tandem.types import EPISODE_STRIDE, EpisodeState


class Journal:
    """``on_durable`` is called with runs that are ready and kept, from any thread.

    All other methods are called under the executor's lock, but ``rewind`` and ``sync``, which wait
    for the writing thread.
    """

    def __init__(
        self,
        writer: StoreWriter | None,
        *,
        on_durable: Callable[[Sequence[Run]], None],
        on_error: Callable[[BaseException], None],
        now: Callable[[], float],
    ) -> None:
        self._writer = writer
        self._now = now
        self._on_durable = on_durable
        self._unwritten: dict[int, Run] = {}
        self._usable: dict[int, int] = {}
        if writer is not None:
            writer.on_written = self._written
            writer.on_error = on_error

    def _written(self, changes: Sequence[Change]) -> None:
        keys = [change.key for change in changes if isinstance(change, StoredEpisode)]
        runs = [run for key in keys if (run := self._unwritten.pop(key, None)) is not None]
        if runs:
            self._on_durable(runs)

    # --- what happens -----------------------------------------------------------------------------

    def dispatched(self, runs: Sequence[Run], version: int) -> None:
        """Attempts that begin now."""
        if self._writer is not None and runs:
            attempts = [[run.episode_id, run.episode.attempt] for run in runs]
            self._writer.log(
                "dispatch", version, {"attempts": attempts, "lease_s": runs[0].timeout_s}
            )

    def ready(self, run: Run) -> None:
        """An attempt whose rows are to be kept; ``on_durable`` follows."""
        if self._writer is None:
            self._on_durable([run])
            return
        stored = self._store(run, EpisodeState.READY, None, None)
        self._unwritten[stored.key] = run
        self._writer.put(stored)

    def hurry(self) -> None:
        """Somebody waits for what is ready, but not kept."""
        if self._writer is not None:
            self._writer.hurry()

    def closed(self, run: Run, state: EpisodeState, reason: str, version: int) -> None:
        """An attempt that is final without having been trained on."""
        if self._writer is None:
            return
        if run.key is None:
            self._writer.put(self._store(run, state, reason, version))
        else:
            self._unwritten.pop(run.key, None)
            self._writer.put(Moved((run.key,), state, version, reason))

    def handed_over(self, runs: Sequence[Run], version: int) -> None:
        """A training batch, in the order of its rows."""
        if self._writer is not None:
            keys = _keys(runs)
            members = [
                [run.episode_id, run.episode.attempt, key]
                for run, key in zip(runs, keys, strict=True)
            ]
            self._writer.put(Moved(keys, EpisodeState.IN_TRAINING, version, step=version + 1))
            self._writer.log("batch", version, {"members": members})

    def consumed(self, runs: Sequence[Run], version: int) -> None:
        if self._writer is not None and runs:
            self._writer.put(Moved(_keys(runs), EpisodeState.CONSUMED, version, step=version))

    def _store(
        self, run: Run, state: EpisodeState, reason: str | None, closed_version: int | None
    ) -> StoredEpisode:
        assert self._writer is not None
        run.key = self._writer.next_key()
        facts, now = run.facts or NO_ROWS, self._now()
        packed = None
        if run.rows is not None:
            packed = pack_rows(run.rows)
            run.rows.arrays = {}  # nobody else wants them, and many may be ready at once
        started = now if run.started_at is None else run.started_at
        return StoredEpisode(
            key=run.key,
            episode_id=run.episode_id,
            attempt=run.episode.attempt,
            state=state,
            incarnation=self._writer.incarnation,
            started_version=run.started_version,
            reason=reason,
            oldest_version=facts.oldest,
            newest_version=facts.newest,
            closed_version=closed_version,
            reward=facts.reward,
            num_rows=facts.num_rows,
            num_tokens=facts.num_trained,
            ended_at=time.time(),
            queued_s=started - run.queued_at,
            running_s=now - started,
            content=run.content(packed),
        )

    # --- after a resume ---------------------------------------------------------------------------

    def rewind(
        self, state: Mapping[str, Any], open_ids: Sequence[int], *, reuse: bool
    ) -> Mapping[int, int]:
        """Go back to a checkpoint of the executor; returns the attempt to run next, by episode.

        With ``reuse``, what is ready in the store is given to ``take`` instead of run again.
        """
        if self._writer is None:
            return {}
        feed = state["feed"]
        self._writer.flush()
        point = RewindPoint(
            step=int(state["version"]),
            open_ids=frozenset(open_ids),
            first_new_id=int(feed["epoch"]) * EPISODE_STRIDE + int(feed["position"]),
            reuse_below=FIRST_FREE_ID if reuse else 0,
        )
        result = self._writer.store.rewind(point)
        self._usable = dict(result.ready)
        return result.attempts

    def take(self, episode_id: int) -> StoredEpisode | None:
        """The attempt that is ready in the store and need not run again; at most once."""
        key = self._usable.pop(episode_id, None)
        if key is None or self._writer is None:
            return None
        for stored in self._writer.store.find(Query(episode_id=episode_id)):
            if stored.key == key:
                return stored
        raise StoreError(f"attempt {key} of episode {episode_id} is no longer in the store")

    def load(self, run: Run) -> TensorDict:
        """The rows of an attempt that ``take`` gave."""
        assert self._writer is not None
        assert run.key is not None
        rows = self._writer.store.content(run.key).rows
        if rows is None:
            raise StoreError(f"{run.name} is ready in the store, but has no rows there")
        return unpack_rows(rows, episode_id=run.episode_id, attempt=run.episode.attempt)

    def sync(self) -> None:
        """Everything told so far survives a power failure when this returns."""
        if self._writer is not None:
            self._writer.sync()


def _keys(runs: Sequence[Run]) -> tuple[int, ...]:
    keys = tuple(run.key for run in runs if run.key is not None)
    assert len(keys) == len(runs), "a batch holds an attempt that was never stored"
    return keys
