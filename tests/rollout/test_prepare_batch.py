"""prepare_batch: a full pipeline, staleness at hand-over, synchronous order, data, resume."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tandem.errors import CheckpointError, DataError, EngineError, RolloutError
from tandem.rollout.rows import join_rows
from tandem.rollout.staleness import StalenessLedger
from tests.rollout.doubles import (
    GatedBackend,
    OneRow,
    Prompts,
    count,
    make_engine,
    publish,
    wait_until,
)

WORKFLOW = OneRow()


@pytest.fixture
def engines() -> Iterator[Any]:
    made = []

    def make(backend: GatedBackend | None = None, **rollout: Any) -> Any:
        made.append(make_engine(backend, **rollout))
        return made[-1]

    yield make
    for engine in made:
        engine.destroy()


def ids_of(batch: Any) -> list[int]:
    return batch["episode_ids"].tolist()


# --- synchronous ----------------------------------------------------------------------------------


def test_synchronous_batch_is_enqueued_whole_and_in_order_before_the_first_token(
    engines: Any,
) -> None:
    async def later(episode: Any) -> None:
        for _ in range(10 * episode.episode_id):
            await asyncio.sleep(0)

    backend = GatedBackend()
    engine = engines(backend, batch_size=5, max_staleness=0)
    batch = engine.prepare_batch(Prompts(act=later), WORKFLOW)
    assert ids_of(batch) == [0, 1, 2, 3, 4]
    assert backend.seen == [f"{i}.0.0" for i in range(5)]


def test_nothing_of_the_next_synchronous_batch_starts_before_the_next_batch_is_asked_for(
    engines: Any,
) -> None:
    backend = GatedBackend()
    engine = engines(backend, batch_size=3, max_staleness=0)
    source = Prompts()
    engine.prepare_batch(source, WORKFLOW)
    assert (len(backend.requests), len(source.asked)) == (3, 3)
    with pytest.raises(RolloutError, match="set_version"):
        engine.prepare_batch(source, WORKFLOW)
    publish(engine)
    engine.executor._loop.flush(10)
    assert len(backend.requests) == 3
    batch = engine.prepare_batch(source, WORKFLOW)
    assert ids_of(batch) == [3, 4, 5]
    assert set(batch["versions"][batch["loss_mask"]].tolist()) == {1}


def test_a_rejected_synchronous_episode_is_replaced_by_the_next_prompt(engines: Any) -> None:
    engine = engines(batch_size=3, max_staleness=0)
    source = Prompts(act=lambda episode: "reject" if episode.episode_id == 1 else None)
    assert ids_of(engine.prepare_batch(source, WORKFLOW)) == [0, 2, 3]


@pytest.mark.parametrize("num_rejected", [0, 1, 5])
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_batch_larger_than_what_may_be_rejected_is_filled(
    engines: Any, num_rejected: int, max_staleness: int
) -> None:
    """What is left of the budget bounds what is under way, so the batch takes several goes."""
    engine = engines(
        batch_size=10, max_staleness=max_staleness, max_rejected_in_row=7, wait_timeout_s=20.0
    )
    source = Prompts(act=lambda e: "reject" if e.episode_id < num_rejected else None)
    batch = engine.prepare_batch(source, WORKFLOW)
    assert ids_of(batch) == list(range(num_rejected, num_rejected + 10))


def test_a_caller_that_held_prompts_back_submits_more_when_the_others_are_accepted(
    engines: Any,
) -> None:
    """It sleeps when the accepted ones end: five rejections leave two, and five are under way."""
    backend = GatedBackend()
    backend.allow(lambda req, made: int(req.rid.split(".")[0]) < 5)
    engine = engines(
        backend, batch_size=10, max_staleness=0, max_rejected_in_row=7, wait_timeout_s=20.0
    )
    source = Prompts(act=lambda e: "reject" if e.episode_id < 5 else None)
    asleep = engine.executor._loop.enough._waiters
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(engine.prepare_batch, source, WORKFLOW)
        wait_until(engine, lambda: count(engine, "rejected") == 5)
        with engine.executor._lock:
            while not asleep:  # nobody is told of a caller that goes to sleep
                engine.executor._lock.wait(0.01)
        backend.allow(lambda req, made: True)
        assert ids_of(future.result(60)) == list(range(5, 15))


def test_a_batch_without_rejections_starts_as_a_whole(engines: Any) -> None:
    backend = GatedBackend()
    backend.allow(lambda req, made: False)
    engine = engines(backend, batch_size=5, max_staleness=0, max_rejected_in_row=2)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(engine.prepare_batch, Prompts(), WORKFLOW)
        backend.wait_requests(5)
        backend.allow(lambda req, made: True)
        assert ids_of(future.result(60)) == [0, 1, 2, 3, 4]


def test_generation_is_released_when_a_source_raises(engines: Any) -> None:
    backend = GatedBackend()
    engine = engines(backend, max_staleness=0)
    with pytest.raises(DataError, match="0 rows"):
        engine.prepare_batch(Prompts(0), WORKFLOW)
    assert not backend._paused


def test_a_users_pause_of_generation_outlasts_the_start_of_a_batch(engines: Any) -> None:
    backend = GatedBackend()
    engine = engines(backend, max_staleness=0, wait_timeout_s=0.2)
    engine.pause_generation()
    with pytest.raises(TimeoutError, match="running 2"):
        engine.prepare_batch(Prompts(), WORKFLOW)
    engine.resume_generation()
    assert ids_of(engine.prepare_batch(Prompts(), WORKFLOW)) == [0, 1]


# --- asynchronous ---------------------------------------------------------------------------------


def test_asynchronous_pipeline_starts_what_staleness_allows_and_queues_a_batch(
    engines: Any,
) -> None:
    backend = GatedBackend()
    backend.allow(lambda req, made: req.rid.split(".")[0] in "01")
    engine = engines(backend, batch_size=2, max_staleness=1)
    engine.prepare_batch(Prompts(), WORKFLOW)
    backend.wait_requests(4)
    assert (count(engine, "in_training"), count(engine, "running")) == (2, 2)
    assert count(engine, "queued") == 2
    publish(engine)
    backend.wait_requests(6)


def test_places_freed_by_rejections_are_taken_while_the_trainer_is_busy(engines: Any) -> None:
    backend = GatedBackend()
    backend.allow(lambda req, made: req.rid.split(".")[0] in "0123")
    engine = engines(backend, batch_size=2, max_staleness=1)

    def accept(rows: Any) -> bool:
        return ids_of(rows)[0] not in (2, 3)

    engine.prepare_batch(Prompts(), WORKFLOW, accept)
    backend.wait_requests(6)
    wait_until(engine, lambda: count(engine, "rejected") == 2)


def held_episode(stale_policy: str, engines: Any, max_staleness: int = 1) -> Any:
    """Episode 0 makes one token at version 0 and stops; batches go on without it."""
    backend = GatedBackend()
    backend.allow(lambda req, made: made < 1 or not req.rid.startswith("0."))
    engine = engines(backend, batch_size=2, max_staleness=max_staleness, stale_policy=stale_policy)
    return backend, engine


def test_drop_leaves_a_too_old_episode_out_and_counts_it(engines: Any) -> None:
    backend, engine = held_episode("drop", engines)
    source = Prompts()
    for _ in range(2):
        assert 0 not in ids_of(engine.prepare_batch(source, WORKFLOW))
        publish(engine)
    backend.allow(lambda req, made: True)
    wait_until(engine, lambda: count(engine, "running") == 0)
    assert 0 not in ids_of(engine.prepare_batch(source, WORKFLOW))
    assert count(engine, "stale") == 1
    metrics = engine.take_metrics()
    assert metrics["staleness/dropped"] == 1
    assert metrics["staleness/max"] <= 1


def test_mask_keeps_the_fresh_tokens_of_a_too_old_episode(engines: Any) -> None:
    backend, engine = held_episode("mask", engines)
    source = Prompts()
    for _ in range(2):
        engine.prepare_batch(source, WORKFLOW)
        publish(engine)
    backend.allow(lambda req, made: True)
    wait_until(engine, lambda: count(engine, "running") == 0)
    batch = engine.prepare_batch(source, WORKFLOW)
    row = ids_of(batch).index(0)
    assert batch["versions"][row].tolist() == [-1, -1, 0, 2]
    assert batch["loss_mask"][row].tolist() == [False, False, False, True]
    assert engine.take_metrics()["staleness/masked_tokens"] == 1


def test_wait_holds_the_batch_for_an_episode_that_would_expire(engines: Any) -> None:
    backend, engine = held_episode("wait", engines)
    source = Prompts()
    assert 0 not in ids_of(engine.prepare_batch(source, WORKFLOW))
    publish(engine)
    engine.executor._config = engine.executor._config.model_copy(update={"wait_timeout_s": 0.1})
    with pytest.raises(TimeoutError, match="episode 0 attempt 0"):
        engine.prepare_batch(source, WORKFLOW)
    backend.allow(lambda req, made: True)
    engine.executor._config = engine.executor._config.model_copy(update={"wait_timeout_s": 20.0})
    batch = engine.prepare_batch(source, WORKFLOW)
    assert 0 in ids_of(batch)
    assert engine.take_metrics()["staleness/max"] == 1
    assert count(engine, "stale") == 0


def test_without_the_consumption_rule_the_hand_over_check_goes_off(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is checked on the tokens themselves, not only by the rule that keeps it."""
    monkeypatch.setattr(StalenessLedger, "expired", lambda self, version: [])

    def join_unmasked(rows: Any, *, version: int, max_staleness: int) -> Any:
        return join_rows(rows, version=version, max_staleness=10**6)

    monkeypatch.setattr("tandem.rollout.pipeline.join_rows", join_unmasked)
    backend, engine = held_episode("drop", engines)
    source = Prompts()
    for _ in range(2):
        engine.prepare_batch(source, WORKFLOW)
        publish(engine)
    backend.allow(lambda req, made: True)
    wait_until(engine, lambda: count(engine, "running") == 0)
    with pytest.raises(AssertionError, match="max=2"):
        engine.prepare_batch(source, WORKFLOW)


def test_the_bound_holds_when_versions_move_faster_than_batches(engines: Any) -> None:
    engine = engines(batch_size=2, max_staleness=1, stale_policy="wait")
    source = Prompts()
    for step in range(12):
        engine.prepare_batch(source, WORKFLOW)
        assert engine.take_metrics()["staleness/max"] <= 1
        for _ in range(1 + step % 3):
            publish(engine)


# --- data -----------------------------------------------------------------------------------------


def test_a_source_goes_on_into_the_next_epoch(engines: Any) -> None:
    engine = engines(batch_size=2, max_staleness=0)
    source = Prompts(3)
    seen = []
    for _ in range(3):
        seen += ids_of(engine.prepare_batch(source, WORKFLOW))
        publish(engine)
    assert seen == [0, 1, 2, 1 << 40, (1 << 40) + 1, (1 << 40) + 2]


def test_a_list_is_read_again_at_its_end(engines: Any) -> None:
    engine = engines(batch_size=3, max_staleness=0)
    assert len(ids_of(engine.prepare_batch([{"a": 1}, {"a": 2}], WORKFLOW))) == 3


def test_an_iterator_that_ends_leaves_its_last_whole_batch_and_then_an_error(
    engines: Any,
) -> None:
    engine = engines(batch_size=2, max_staleness=1)
    source = iter([{"row": i} for i in range(3)])
    engine.prepare_batch(source, WORKFLOW)
    publish(engine)
    with pytest.raises(RolloutError, match="2 episodes can no longer be reached"):
        engine.prepare_batch(source, WORKFLOW)


def test_empty_data_are_an_error(engines: Any) -> None:
    engine = engines()
    with pytest.raises(DataError, match="0 rows"):
        engine.prepare_batch([], WORKFLOW)


# --- resume ---------------------------------------------------------------------------------------


def test_open_episodes_run_again_first_with_the_next_attempt(engines: Any) -> None:
    backend = GatedBackend()
    backend.allow(lambda req, made: not req.rid.startswith("2."))
    first = engines(backend, batch_size=2, max_staleness=1)
    assert ids_of(first.prepare_batch(Prompts(), WORKFLOW)) == [0, 1]
    publish(first)
    wait_until(first, lambda: count(first, "ready") == 3 or count(first, "queued") == 0)
    state = json.loads(json.dumps(first.state_dict()))
    open_ids = [key for key, _ in state["open_episodes"]]
    assert open_ids == [2, 3, 4, 5]
    position = state["feed"]["position"]
    first.destroy()

    second_backend = GatedBackend()
    second = engines(second_backend, batch_size=4, max_staleness=0)
    second.load_state_dict(state)
    second.backend.commit(1)
    batch = second.prepare_batch(Prompts(), WORKFLOW)
    assert ids_of(batch) == [2, 3, 4, 5]
    assert batch["attempt"].tolist() == [attempt for _, attempt in state["open_episodes"]]
    assert batch["attempt"][0] == 1
    publish(second)
    assert ids_of(second.prepare_batch(Prompts(), WORKFLOW))[0] == position
    counts = second.executor.ledger.counts()
    assert counts["superseded"] == 4
    assert sum(counts.values()) == second.executor.ledger.submitted


def test_a_resumed_synchronous_run_sees_the_batches_of_the_unbroken_one(engines: Any) -> None:
    def batches(engine: Any, steps: int) -> list[list[int]]:
        seen = []
        for _ in range(steps):
            seen.append(ids_of(engine.prepare_batch(Prompts(7), WORKFLOW)))
            publish(engine)
        return seen

    unbroken = batches(engines(batch_size=3, max_staleness=0), 6)
    first = engines(batch_size=3, max_staleness=0)
    before = batches(first, 2)
    second = engines(batch_size=3, max_staleness=0)
    second.load_state_dict(first.state_dict())
    second.backend.commit(2)
    assert before + batches(second, 4) == unbroken


def test_a_resumed_engine_refuses_to_roll_out_with_old_weights(engines: Any) -> None:
    first = engines()
    publish(first)
    second = engines()
    second.load_state_dict(first.state_dict())
    with pytest.raises(EngineError, match="publish"):
        second.prepare_batch(Prompts(), WORKFLOW)


def test_reruns_need_a_random_access_source_and_a_fresh_engine(engines: Any) -> None:
    first = engines()
    first.prepare_batch(Prompts(), WORKFLOW)
    second = engines()
    second.load_state_dict(first.state_dict())
    with pytest.raises(CheckpointError, match="list"):
        second.prepare_batch([{}], WORKFLOW)
    with pytest.raises(RolloutError, match="fresh engine"):
        first.load_state_dict(second.state_dict())


def test_the_queue_is_filled_again_when_a_batch_was_ready_at_once(engines: Any) -> None:
    """Else the generator has nothing to start when the next version frees places."""
    engine = engines(batch_size=2, max_staleness=1)
    source = Prompts()
    assert ids_of(engine.prepare_batch(source, WORKFLOW)) == [0, 1]
    publish(engine)
    wait_until(engine, lambda: count(engine, "ready") == 4)
    assert ids_of(engine.prepare_batch(source, WORKFLOW)) == [2, 3]
    publish(engine)
    wait_until(engine, lambda: count(engine, "ready") == 4)
    assert ids_of(engine.prepare_batch(source, WORKFLOW)) == [4, 5]
