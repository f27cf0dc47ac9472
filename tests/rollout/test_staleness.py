"""The ledger's arithmetic: admission in both forms, transitions, and the choice of a batch."""

from __future__ import annotations

import random

import pytest

from tandem.errors import ConfigError, RolloutError
from tandem.rollout.staleness import StalenessLedger, capacity, capacity_at_version
from tandem.types import EpisodeState


def ledger(**changes: object) -> StalenessLedger:
    settings: dict[str, object] = {"max_concurrent": 100, "max_staleness": 0, "batch_size": 4}
    return StalenessLedger(**(settings | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("max_concurrent", "running", "accepted", "eta", "version", "expected"),
    [
        (64, 0, 0, 0, 0, 8),
        (64, 8, 0, 0, 0, 0),
        (64, 0, 8, 0, 1, 8),
        (64, 4, 12, 2, 1, 16),
        (4, 3, 0, 8, 0, 1),
        (64, 2, 40, 1, 3, -2),
    ],
)
def test_capacity_from_running_totals(
    max_concurrent: int, running: int, accepted: int, eta: int, version: int, expected: int
) -> None:
    received = capacity_at_version(
        max_concurrent, eta, 8, version=version, running=running, accepted=accepted
    )
    assert received == expected


def test_both_forms_agree_when_every_version_consumed_one_batch() -> None:
    draw = random.Random(0)
    for _ in range(200):
        size, eta, version, running, ready = (draw.randint(1, 9) for _ in range(5))
        in_training = draw.choice([0, size])
        by_state = capacity(64, eta, size, running, ready, in_training)
        accepted = version * size + ready + in_training
        assert by_state == capacity_at_version(
            64, eta, size, version=version, running=running, accepted=accepted
        )


def test_at_least_one_may_run() -> None:
    assert capacity(0, 0, 4, 0, 0, 0) == 1


def test_recovery_at_a_late_version_does_not_inflate_capacity() -> None:
    assert capacity_at_version(10_000, 2, 8, version=50, running=0, accepted=50 * 8) == 24
    recovered = ledger(max_concurrent=10_000, max_staleness=2, batch_size=8)
    recovered.load_state_dict({"submitted": 400, "counts": {"consumed": 400}})
    assert recovered.accepted == 400
    assert recovered.capacity() == 24


def test_rejected_and_failed_episodes_free_their_places() -> None:
    book = ledger()
    for key in range(4):
        book.submit(key)
        book.start(key, 0)
    assert book.capacity() == 0
    book.finish(0, 0, 0)
    book.finish(1, 0, 0)
    book.close(2, EpisodeState.REJECTED)
    book.close(3, EpisodeState.FAILED)
    assert book.count(EpisodeState.RUNNING) == 0
    assert book.accepted == 2
    assert book.count(EpisodeState.REJECTED) + book.count(EpisodeState.FAILED) == 2
    assert book.capacity() == 2


def test_an_attempt_that_ended_frees_the_place_of_a_running_one() -> None:
    book = ledger(max_concurrent=2, max_staleness=1)  # 8 places under the staleness rule
    for key in range(2):
        book.submit(key)
        book.start(key, 0)
    assert book.capacity() == 0
    book.end(0)
    assert (book.num_unkept, book.count(EpisodeState.RUNNING), book.capacity()) == (1, 2, 1)
    book.finish(0, 0, 0)
    assert (book.num_unkept, book.count(EpisodeState.RUNNING), book.capacity()) == (0, 1, 1)
    book.end(1)
    book.close(1, EpisodeState.SUPERSEDED)
    assert (book.num_unkept, book.capacity()) == (0, 2)


def test_an_attempt_ends_once_and_only_while_it_runs() -> None:
    book = ledger()
    book.submit(0)
    with pytest.raises(RolloutError, match="episode 0 is queued; its attempt cannot end"):
        book.end(0)
    book.start(0, 0)
    book.end(0)
    with pytest.raises(RolloutError, match="episode 0 is running; its attempt cannot end"):
        book.end(0)
    with pytest.raises(RolloutError, match="episode 7 is not open"):
        book.end(7)


def test_places_under_the_staleness_rule_stay_taken_until_rows_are_kept() -> None:
    book = ledger(max_concurrent=100, max_staleness=0, batch_size=4)
    for key in range(4):
        book.submit(key)
        book.start(key, 0)
        book.end(key)
    assert (book.num_unkept, book.capacity()) == (4, 0)


def test_a_version_that_consumed_less_than_a_batch_leaks_no_capacity() -> None:
    book = ledger()
    for key in range(4):
        book.submit(key)
        book.start(key, 0)
        book.finish(key, 0, 0)
    book.hand_over([0, 1, 2, 3])
    book.close(3, EpisodeState.REJECTED)
    book.consume()
    assert book.capacity() == 4


def test_lag_is_bounded_when_batches_are_taken_in_order() -> None:
    book = ledger(max_staleness=1, batch_size=2)
    born: dict[int, int] = {}
    lags = []
    for version in range(20):
        while book.capacity() > 0:
            key = book.submitted
            book.submit(key)
            book.start(key, version)
            born[key] = version
            book.finish(key, version, version)
        chosen = book.select(2, version)
        assert chosen is not None
        lags += [version - born[key] for key in chosen]
        book.hand_over(chosen)
        book.consume()
    assert max(lags) == 1


@pytest.mark.parametrize("name", ["finish", "rejected", "hand_over", "stale"])
def test_impossible_transitions_are_refused_by_name(name: str) -> None:
    book = ledger()
    book.submit(5)
    with pytest.raises(RolloutError, match="episode 5 is queued"):
        advance(book, 5, name)


def advance(book: StalenessLedger, key: int, name: str) -> None:
    """A transition by the name of its method, or of the final state."""
    arguments = {"start": (key, 0), "finish": (key, 0, 0), "hand_over": ([key],)}
    if name in arguments:
        getattr(book, name)(*arguments[name])
    else:
        book.close(key, EpisodeState(name))


def test_an_open_id_cannot_be_submitted_twice() -> None:
    book = ledger()
    book.submit(1)
    with pytest.raises(RolloutError, match="already queued"):
        book.submit(1)


def test_limits_are_checked() -> None:
    with pytest.raises(ConfigError, match="batch_size"):
        ledger(batch_size=0)


def test_counts_add_up_in_a_seeded_storm() -> None:
    draw = random.Random(1)
    book = ledger(max_concurrent=5, max_staleness=2, batch_size=3)
    steps = {
        EpisodeState.QUEUED: ["start", "failed", "superseded"],
        EpisodeState.RUNNING: ["finish", "rejected", "failed", "superseded"],
        EpisodeState.READY: ["hand_over", "rejected", "failed", "stale", "superseded"],
        EpisodeState.IN_TRAINING: ["rejected", "superseded"],
    }
    reached: set[str] = set()
    for step in range(3000):
        open_ids = book.ids(*steps)
        if not open_ids or draw.random() < 0.3:
            book.submit(step)
        elif draw.random() < 0.05:
            book.consume()
        else:
            key = draw.choice(open_ids)
            state = book.state_of(key)
            assert state is not None
            advance(book, key, draw.choice(steps[state]))
        assert sum(book.counts().values()) == book.submitted
        reached |= {name for name, number in book.counts().items() if number}
    assert reached == {state.value for state in EpisodeState}


def open_with(book: StalenessLedger, ready: dict[int, int], running: dict[int, int]) -> None:
    for key, version in {**ready, **running}.items():
        book.submit(key)
        book.start(key, version)
    for key, version in ready.items():
        book.finish(key, version, version)


def test_the_oldest_version_goes_first_then_the_first_to_finish() -> None:
    book = ledger(max_staleness=3)
    open_with(book, ready={1: 2, 2: 1, 3: 1, 4: 2}, running={})
    assert book.select(3, 2) == [2, 3, 1]


@pytest.mark.parametrize(("policy", "expected"), [("drop", [1, 2]), ("mask", [1])])
def test_one_old_token_expires_an_episode_but_for_masking_all_must_be_old(
    policy: str, expected: list[int]
) -> None:
    book = ledger(max_staleness=1, stale_policy=policy)
    for key, oldest, newest in ((1, 0, 3), (2, 3, 5), (3, 4, 5)):
        book.submit(key)
        book.start(key, 0)
        book.finish(key, oldest, newest)
    assert book.expired(5) == expected


def test_an_episode_without_trained_tokens_never_expires() -> None:
    book = ledger()
    book.submit(1)
    book.start(1, 0)
    book.finish(1, None, None)
    assert book.expired(99) == []


def test_a_batch_is_held_for_a_running_episode_at_its_last_version() -> None:
    book = ledger(max_staleness=1, batch_size=2)
    open_with(book, ready={1: 1, 2: 1}, running={3: 0})
    assert book.select(2, 1, hold=True) is None
    assert book.select(2, 1) == [1, 2]
    book.finish(3, 0, 1)
    assert book.select(2, 1, hold=True) == [3, 1]


def test_a_batch_is_not_held_for_a_running_episode_with_time_left() -> None:
    book = ledger(max_staleness=1, batch_size=2)
    open_with(book, ready={1: 1, 2: 1}, running={3: 1})
    assert book.select(2, 1, hold=True) == [1, 2]


def test_a_batch_is_held_when_more_would_expire_later_than_a_later_batch_can_take() -> None:
    book = ledger(max_staleness=2, batch_size=2)
    open_with(book, ready={4: 1, 5: 1}, running={1: 0, 2: 0, 3: 0})
    assert book.select(2, 1, hold=True) is None
    book.finish(1, 0, 0)
    assert book.select(2, 1, hold=True) == [1, 4]


def test_holding_loses_nothing_however_slow_episodes_are() -> None:
    """A seeded simulation: whatever ends when, with holding no admitted episode expires."""
    draw = random.Random(2)
    for eta, size in ((0, 2), (1, 2), (2, 3), (4, 2)):
        book = ledger(max_staleness=eta, batch_size=size, max_concurrent=1000)
        started: dict[int, int] = {}
        for version in range(60):
            while book.capacity() > 0:
                started[book.submitted] = version
                book.submit(book.submitted)
                book.start(book.submitted - 1, version)
            while (chosen := book.select(size, version, hold=True)) is None:
                key = draw.choice(book.ids(EpisodeState.RUNNING))
                book.finish(key, started[key], version)
            assert not book.expired(version)
            book.hand_over(chosen)
            book.consume()


def test_a_checkpoint_supersedes_what_was_open() -> None:
    book = ledger()
    open_with(book, ready={1: 0}, running={2: 0})
    book.submit(3)
    restored = ledger()
    restored.load_state_dict(book.state_dict())
    assert restored.submitted == 3
    assert restored.counts()["superseded"] == 3
    assert restored.ids(*EpisodeState) == []


def test_a_damaged_checkpoint_is_refused() -> None:
    with pytest.raises(RolloutError, match="add up to 3"):
        ledger().load_state_dict({"submitted": 4, "counts": {"consumed": 3}})
