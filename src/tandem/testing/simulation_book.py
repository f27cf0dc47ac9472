"""The book of a simulated run, kept from what can be seen and by rules of its own.

It trusts neither the ledger's counts nor the executor's choice: states come from the transitions,
ages from the tensors of the batches.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tandem.config.schema import RolloutConfig
from tandem.types import EpisodeState

if TYPE_CHECKING:
    from tensordict import TensorDict

    from tandem.rollout.executor import RolloutExecutor

_S = EpisodeState
_OPEN = frozenset({_S.QUEUED, _S.RUNNING, _S.READY, _S.IN_TRAINING})
_PLACES = frozenset({_S.RUNNING, _S.READY, _S.IN_TRAINING})


class Book:
    """States of all episodes over all starts of a run.

    Raises:
        AssertionError: from any method, when something broke a rule.
    """

    def __init__(self, config: RolloutConfig) -> None:
        self.num_transitions = 0
        self.trained_tokens = 0
        self.violating_tokens = 0
        self.totals: Counter[EpisodeState] = Counter()
        self._config = config
        self._states: dict[int, EpisodeState] = {}
        self._counts: Counter[EpisodeState] = Counter()
        self._final: list[tuple[int, EpisodeState]] = []
        self._final_at_save = 0
        self._in_training: set[int] = set()
        self._version = 0

    def watch(self, executor: RolloutExecutor, *, start: int) -> None:
        """A new start: what happened after the last checkpoint is void, what was open runs anew."""
        del self._final[self._final_at_save :]
        self._states.clear()
        self._counts.clear()
        self._in_training.clear()
        self._version = start
        self._executor = executor
        executor.ledger.on_move = self._moved

    @property
    def num_final(self) -> int:
        return len(self._final)

    def saved(self, step: int, num_final: int) -> None:
        """A checkpoint counts now; ``num_final`` episodes had ended when it was taken."""
        assert step == self._version, (step, self._version)
        self._final_at_save = num_final

    def _moved(self, episode_id: int, before: EpisodeState | None, to: EpisodeState) -> None:
        """One transition of one episode; called by the ledger when it is done."""
        self.num_transitions += 1
        self.totals[to] += 1
        found = self._states.get(episode_id)
        assert found is before, f"episode {episode_id} was {found}, and moves from {before} to {to}"
        if before is not None:
            self._counts[before] -= 1
        if to in _OPEN:
            self._states[episode_id] = to
            self._counts[to] += 1
        else:
            del self._states[episode_id]
            if to is not _S.SUPERSEDED:
                self._final.append((episode_id, to))
        if to is _S.RUNNING:
            self._check_places()

    def _check_places(self) -> None:
        """After a start no limit is exceeded; a limit may be lowered while more run."""
        running, places = self._check_capacity()
        limit = self._executor.ledger.max_running
        assert running <= limit <= self._config.max_concurrent, f"{running} run, allowed: {limit}"
        assert places >= 0, f"{-places} places more are taken than there are"

    def _check_capacity(self) -> tuple[int, int]:
        """Capacity is what is left of both limits; how many run, and places left for others."""
        config, ledger = self._config, self._executor.ledger
        running = self._counts[_S.RUNNING] - ledger.num_unkept
        places = (config.max_staleness + 1) * config.batch_size
        places -= sum(self._counts[state] for state in _PLACES)
        left = min(ledger.max_running - running, places)
        assert ledger.capacity() == left, f"{ledger.capacity()} places are free, should be {left}"
        return running, places

    def handed_over(self, batch: TensorDict, version: int) -> None:
        """The trainer has ``batch`` and will make ``version + 1`` of it."""
        ids = set(batch["episode_ids"].tolist())
        assert version == self._version, (version, self._version)
        assert len(ids) == self._config.batch_size, f"a batch of {len(ids)} episodes"
        assert all(self._states[key] is _S.IN_TRAINING for key in ids), "a batch of other episodes"
        ages = version - batch["versions"][batch["loss_mask"]]
        self.trained_tokens += len(ages)
        violating = int((ages > self._config.max_staleness).sum())
        self.violating_tokens += violating
        assert not violating, (
            f"{violating} trained tokens are up to {int(ages.max())} versions old at {version}, "
            f"allowed: {self._config.max_staleness}"
        )
        assert (ages >= 0).all(), "a trained token is of a version that does not exist yet"

    def published(self, version: int) -> None:
        """Every place that training held is free again; and all books agree."""
        assert version in (self._version, self._version + 1), (version, self._version)
        self._version = version
        assert self._counts[_S.IN_TRAINING] == 0, "a batch was not consumed"
        ledger = self._executor.ledger
        counted = Counter(self._states.values())
        assert counted == +self._counts, (counted, self._counts)
        for state in _OPEN:
            assert ledger.count(state) == counted[state], (state, ledger.counts(), counted)
        assert set(self._executor.open_ids()) == set(self._states)
        running, _ = self._check_capacity()
        assert running == len(self._executor.loop.active), (running, ledger.num_unkept)

    def open_ids(self, *, without_training: bool = False) -> list[int]:
        return [
            key
            for key, state in self._states.items()
            if not (without_training and state is _S.IN_TRAINING)
        ]

    def finish(self, position: int, open_ids: set[int]) -> None:
        """In the history that survived, every prompt came to exactly one end or is open."""
        ends = Counter(key for key, _ in self._final)
        doubled = [key for key, number in ends.items() if number > 1]
        assert not doubled, f"episodes with two ends: {doubled[:5]}"
        both = open_ids & ends.keys()
        assert not both, f"episodes that ended and are open: {sorted(both)[:5]}"
        lost = set(range(position)) - ends.keys() - open_ids
        assert not lost, f"lost episodes: {sorted(lost)[:5]}"
