"""The one owner of episode states and of the staleness rule: what may start, what may be trained.

Pure: no threads, no clock, no tensors. The executor asks, this answers. How a batch is cut, masked
or waited for is done there.

Two rules bound the age of a trained token. *Admission* limits how many episodes are open, so that
with batches of the planned size nothing needs to expire (AReaL, arXiv:2505.24298, eq. 3).
*Consumption* looks at the tokens themselves when a batch is handed over, because an episode may
outlive its place in the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tandem.errors import ConfigError, RolloutError
from tandem.rollout.pacing import Pacer
from tandem.types import EpisodeState

StalePolicy = Literal["drop", "mask", "wait", "pace"]
_MASKING = frozenset({"mask", "pace"})

_S = EpisodeState
_ALLOWED: dict[EpisodeState, frozenset[EpisodeState]] = {
    _S.QUEUED: frozenset({_S.RUNNING, _S.FAILED, _S.SUPERSEDED}),
    _S.RUNNING: frozenset({_S.READY, _S.REJECTED, _S.FAILED, _S.SUPERSEDED}),
    _S.READY: frozenset({_S.IN_TRAINING, _S.REJECTED, _S.FAILED, _S.STALE, _S.SUPERSEDED}),
    _S.IN_TRAINING: frozenset({_S.CONSUMED, _S.REJECTED, _S.SUPERSEDED}),
}
"""Where an open episode may go; the states that are not keys are final."""

OPEN_STATES = tuple(_ALLOWED)


def capacity(
    max_concurrent: int,
    max_staleness: int,
    batch_size: int,
    running: int,
    ready: int,
    in_training: int,
) -> int:
    """How many more episodes may start now; negative when a limit was lowered meanwhile.

    ``min(max(1, max_concurrent) - running, (max_staleness + 1) * batch_size - open)`` with
    ``open = ready + running + in_training``.
    """
    concurrency = max(1, max_concurrent) - running
    return min(concurrency, (max_staleness + 1) * batch_size - (ready + running + in_training))


def capacity_at_version(
    max_concurrent: int,
    max_staleness: int,
    batch_size: int,
    *,
    version: int,
    running: int,
    accepted: int,
) -> int:
    """The same number from running totals: ``(eta + version + 1) * B - (accepted + running)``.

    ``accepted`` counts every episode ever accepted, so after a recovery it must be
    ``version * batch_size``. Equals ``capacity`` when every version consumed one full batch.
    """
    concurrency = max(1, max_concurrent) - running
    return min(concurrency, (max_staleness + version + 1) * batch_size - (accepted + running))


def _none() -> dict[EpisodeState, int]:
    return dict.fromkeys(EpisodeState, 0)


@dataclass(slots=True)
class _Open:
    """An episode that is not final. ``oldest``/``newest``: versions of its trained tokens.

    ``has_ended``: its attempt is over, and its rows are being kept before it is ready.
    """

    state: EpisodeState
    started_at: int | None = None
    has_ended: bool = False
    finished: int = 0
    oldest: int | None = None
    newest: int | None = None

    @property
    def birth(self) -> int:
        """Oldest version this episode can hold; a running one is as old as its start."""
        if self.oldest is not None:
            return self.oldest
        return self.started_at or 0


class StalenessLedger:
    """States of all episodes of a run. At every moment the counts add up to ``submitted``."""

    def __init__(
        self,
        *,
        max_concurrent: int,
        max_staleness: int,
        batch_size: int,
        stale_policy: StalePolicy = "wait",
    ) -> None:
        if max_staleness < 0 or batch_size < 1:
            raise ConfigError(
                f"max_staleness {max_staleness}, batch_size {batch_size}: allowed are "
                "max_staleness >= 0 and batch_size >= 1"
            )
        self.max_concurrent = max_concurrent
        self.max_staleness = max_staleness
        self.batch_size = batch_size
        self.stale_policy = stale_policy
        self.submitted = 0
        self.on_move: Callable[[int, EpisodeState | None, EpisodeState], None] | None = None
        """Told of every transition when it is done: id, the state before (None: new), the state."""
        self.num_unkept = 0
        """Running episodes whose attempt is over; ``max_concurrent`` does not count them."""
        self._counts = _none()
        self._open: dict[int, _Open] = {}
        self._finished = 0
        self._pacer = Pacer(max_concurrent, batch_size) if stale_policy == "pace" else None

    # questions

    def count(self, state: EpisodeState) -> int:
        return self._counts[state]

    def counts(self) -> dict[str, int]:
        return {state.value: self._counts[state] for state in EpisodeState}

    def state_of(self, episode_id: int) -> EpisodeState | None:
        """State of an open episode; None when it is final or unknown."""
        entry = self._open.get(episode_id)
        return None if entry is None else entry.state

    def ids(self, *states: EpisodeState) -> list[int]:
        """Open episodes in these states, in order of submission."""
        return [key for key, entry in self._open.items() if entry.state in states]

    @property
    def accepted(self) -> int:
        """Episodes that were or will be trained on: ready, in training or consumed."""
        return self._counts[_S.READY] + self._counts[_S.IN_TRAINING] + self._counts[_S.CONSUMED]

    @property
    def max_running(self) -> int:
        """``max_concurrent``, or with the ``pace`` policy what is needed of it."""
        return self.max_concurrent if self._pacer is None else self._pacer.limit

    def capacity(self) -> int:
        """How many queued episodes may start now."""
        return capacity(
            max(1, self.max_running) + self.num_unkept,
            self.max_staleness,
            self.batch_size,
            self._counts[_S.RUNNING],
            self._counts[_S.READY],
            self._counts[_S.IN_TRAINING],
        )

    def staleness_room(self) -> int:
        """Capacity without the concurrency limit: places left under the staleness rule."""
        taken = self._counts[_S.RUNNING] + self._counts[_S.READY] + self._counts[_S.IN_TRAINING]
        return (self.max_staleness + 1) * self.batch_size - taken

    def reachable(self, *, more_to_come: bool = False) -> int:
        """Upper bound on the episodes a caller can still be given before the next version.

        ``more_to_come``: the queue can be filled, so that only the staleness rule bounds it.
        """
        held = self._counts[_S.READY] + self._counts[_S.RUNNING]
        room = max(0, self.staleness_room())
        return held + (room if more_to_come else min(self._counts[_S.QUEUED], room))

    def expired(self, version: int) -> list[int]:
        """Ready episodes that may not be trained on by ``version`` any more.

        One token too old is enough, except where old tokens are masked (``mask``, ``pace``):
        there all must be.
        """
        limit = version - self.max_staleness
        result = []
        for key, entry in self._open.items():
            age = entry.newest if self.stale_policy in _MASKING else entry.oldest
            if entry.state is _S.READY and age is not None and age < limit:
                result.append(key)
        return result

    def select(self, count: int, version: int, *, hold: bool = False) -> list[int] | None:
        """The ``count`` ready episodes to hand over now, oldest first, or None: wait on.

        With ``hold`` the batch waits for running episodes that would expire otherwise. Once this
        batch is trained the limit moves up by one version a batch, so of the episodes left behind
        at most ``k`` batches' worth may be born at or before ``version - max_staleness + k``.
        Admission makes this reachable, so with it nothing expires that a wait could have saved.
        """
        ready = [(k, e) for k, e in self._open.items() if e.state is _S.READY]
        if len(ready) < count:
            if self._pacer is not None:
                self._pacer.starved()
            return None
        ready.sort(key=lambda item: (item[1].birth, item[1].finished))
        if hold and self._must_hold([e for _, e in ready[count:]], version):
            if self._pacer is not None:
                self._pacer.held()
            return None
        if self._pacer is not None:
            self._pacer.served(len(ready) - count)
        return [key for key, _ in ready[:count]]

    def _must_hold(self, left_ready: list[_Open], version: int) -> bool:
        running = [e for e in self._open.values() if e.state is _S.RUNNING]
        for k in range(self.max_staleness + 1):
            border = version - self.max_staleness + k
            waiting = sum(e.birth <= border for e in running)
            left = waiting + sum(e.birth <= border for e in left_ready)
            if waiting and left > k * self.batch_size:
                return True
        return False

    # transitions

    def submit(self, episode_id: int) -> None:
        if episode_id in self._open:
            raise RolloutError(
                f"episode {episode_id} is already {self._open[episode_id].state}; supersede it "
                "first or submit another id"
            )
        self.submitted += 1
        self._open[episode_id] = _Open(_S.QUEUED)
        self._counts[_S.QUEUED] += 1
        self._check()
        if self.on_move is not None:
            self.on_move(episode_id, None, _S.QUEUED)

    def start(self, episode_id: int, version: int) -> None:
        """Take a place; ``version`` is the one that serves now."""
        self._move(episode_id, _S.RUNNING).started_at = version

    def end(self, episode_id: int) -> None:
        """The attempt of a running episode is over, and others may have its place; what it made is
        not kept yet."""
        entry = self._open.get(episode_id)
        if entry is None or entry.state is not _S.RUNNING or entry.has_ended:
            state = "not open" if entry is None else entry.state
            raise RolloutError(f"episode {episode_id} is {state}; its attempt cannot end now")
        entry.has_ended = True
        self.num_unkept += 1

    def finish(self, episode_id: int, oldest: int | None, newest: int | None) -> None:
        """Running → ready; versions of its oldest and newest trained token, None without one."""
        entry = self._move(episode_id, _S.READY)
        self._finished += 1
        entry.finished, entry.oldest, entry.newest = self._finished, oldest, newest

    def close(self, episode_id: int, state: EpisodeState) -> None:
        """Final without training: rejected, failed, stale or superseded."""
        self._move(episode_id, state)

    def hand_over(self, episode_ids: Iterable[int]) -> None:
        for episode_id in episode_ids:
            self._move(episode_id, _S.IN_TRAINING)

    def consume(self) -> list[int]:
        """A new version serves: everything in training is consumed."""
        ids = self.ids(_S.IN_TRAINING)
        for episode_id in ids:
            self._move(episode_id, _S.CONSUMED)
        return ids

    def _move(self, episode_id: int, to: EpisodeState) -> _Open:
        entry = self._open.get(episode_id)
        if entry is None or to not in _ALLOWED[entry.state]:
            state = "not open" if entry is None else entry.state
            raise RolloutError(f"episode {episode_id} is {state}; it cannot become {to}")
        before, entry.state = entry.state, to
        if entry.has_ended and before is _S.RUNNING:
            self.num_unkept -= 1
        self._counts[before] -= 1
        self._counts[to] += 1
        if to not in _ALLOWED:
            del self._open[episode_id]
        self._check()
        if self.on_move is not None:
            self.on_move(episode_id, before, to)
        return entry

    def _check(self) -> None:
        counts = self._counts
        assert sum(counts.values()) == self.submitted, (counts, self.submitted)
        places = counts[_S.RUNNING] + counts[_S.READY] + counts[_S.IN_TRAINING]
        open_count = counts[_S.QUEUED] + places
        assert open_count == len(self._open), (counts, len(self._open))

    # checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {"submitted": self.submitted, "counts": self.counts()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the counts of a checkpoint; what was open there is superseded and runs again."""
        counts = _none() | {EpisodeState(name): int(n) for name, n in state["counts"].items()}
        for open_state in OPEN_STATES:
            counts[_S.SUPERSEDED] += counts[open_state]
            counts[open_state] = 0
        self._open.clear()
        self.num_unkept = 0
        self._counts, self.submitted = counts, int(state["submitted"])
        if sum(counts.values()) != self.submitted:
            raise RolloutError(
                f"ledger state: counts add up to {sum(counts.values())}, submitted is "
                f"{self.submitted}; the saved state is damaged"
            )
