"""Submitting, waiting, pausing, budgets and deadlines of the executor, over a gated backend."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tandem.errors import ConfigError, DataError, EngineError, RolloutError, WeightSyncError
from tandem.rollout.runs import FIRST_FREE_ID
from tandem.types import Prompt
from tests.rollout.doubles import (
    TIMEOUT_S,
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
    """``make_engine`` whose engines are destroyed at the end."""
    made = []

    def make(backend: GatedBackend | None = None, **rollout: Any) -> Any:
        made.append(make_engine(backend, **rollout))
        return made[-1]

    yield make
    for engine in made:
        engine.destroy()


def fail(episode: Any) -> None:
    raise ValueError(f"bad episode {episode.episode_id}")


def ids_of(batch: Any) -> list[int]:
    return batch["episode_ids"].tolist()


def test_wait_takes_the_first_to_finish_and_returns_them_in_order_of_submission(
    engines: Any,
) -> None:
    backend = GatedBackend()
    backend.allow(lambda req, made: False)
    engine = engines(backend, batch_size=4)
    ids = [engine.submit(Prompt(0, i, {}), WORKFLOW) for i in range(4)]
    backend.wait_requests(4)
    for first in (3, 1):
        backend.allow(lambda req, made, first=first: req.rid.startswith(f"{first}."))
        wait_until(engine, lambda first=first: count(engine, "ready") == (1 if first == 3 else 2))
    assert ids_of(engine.wait(2)) == [ids[1], ids[3]]
    assert count(engine, "in_training") == 2
    backend.allow(lambda req, made: True)
    assert ids_of(engine.wait(2)) == [ids[0], ids[2]]


def test_wait_prefers_the_oldest_version(engines: Any) -> None:
    backend = GatedBackend()
    backend.allow(lambda req, made: req.rid.startswith("1."))
    engine = engines(backend, batch_size=2, max_staleness=3)
    engine.submit(Prompt(0, 0, {}), WORKFLOW)
    backend.wait_requests(1)
    engine.backend.commit(1)
    engine.submit(Prompt(0, 1, {}), WORKFLOW)
    wait_until(engine, lambda: count(engine, "ready") == 1)
    # Episode 0 finishes last; its first token was made at version 0 all the same.
    engine.backend.commit(0)
    backend.allow(lambda req, made: True)
    wait_until(engine, lambda: count(engine, "ready") == 2)
    engine.backend.commit(1)
    assert ids_of(engine.wait(1)) == [0]


def test_submit_returns_ids_at_once_and_mappings_get_free_ones(engines: Any) -> None:
    backend = GatedBackend()
    backend.allow(lambda req, made: False)
    engine = engines(backend)
    assert engine.submit(Prompt(2, 7, {}), WORKFLOW) == (2 << 40) + 7
    assert engine.submit({}, WORKFLOW) == FIRST_FREE_ID
    assert engine.submit({}, WORKFLOW) == FIRST_FREE_ID + 1


def test_a_timeout_loses_nothing(engines: Any) -> None:
    backend = GatedBackend()
    backend.allow(lambda req, made: req.rid.startswith("0."))
    engine = engines(backend)
    for i in range(2):
        engine.submit(Prompt(0, i, {}), WORKFLOW)
    wait_until(engine, lambda: count(engine, "ready") == 1)
    with pytest.raises(TimeoutError, match="ready 1"):
        engine.wait(2, timeout=0.01)
    backend.allow(lambda req, made: True)
    assert ids_of(engine.wait(2)) == [0, 1]


def test_a_count_that_cannot_be_reached_raises_with_counts_at_once(engines: Any) -> None:
    engine = engines(batch_size=4)
    for i in range(4):
        engine.submit(Prompt(0, i, {}), WORKFLOW)
    wait_until(engine, lambda: count(engine, "ready") == 4)
    with pytest.raises(RolloutError, match="rejected 4"):
        engine.wait(4, should_accept=lambda rows: False)
    engine.destroy()
    assert not [t for t in threading.enumerate() if t.name.startswith("tandem-rollout")]


def test_more_than_the_staleness_budget_cannot_be_reached(engines: Any) -> None:
    engine = engines(batch_size=2, max_staleness=0)
    for i in range(5):
        engine.submit(Prompt(0, i, {}), WORKFLOW)
    with pytest.raises(RolloutError, match="at most 2"):
        engine.wait(3)
    assert ids_of(engine.wait(2)) == [0, 1]
    with pytest.raises(RolloutError, match="set_version"):
        engine.wait(1)
    publish(engine)
    assert ids_of(engine.wait(2)) == [2, 3]


def test_a_filter_sees_each_episode_once_and_rejects(engines: Any) -> None:
    engine = engines(batch_size=4)
    for i in range(4):
        engine.submit(Prompt(0, i, {}), WORKFLOW)
    wait_until(engine, lambda: count(engine, "ready") == 4)
    seen: list[int] = []

    def even(rows: Any) -> bool:
        seen.append(int(rows["episode_ids"][0]))
        return seen[-1] % 2 == 0

    assert ids_of(engine.wait(2, should_accept=even)) == [0, 2]
    assert sorted(seen) == [0, 1, 2, 3]


def test_a_filter_that_raises_fails_the_episode(engines: Any) -> None:
    engine = engines(max_failures_in_row=10)
    engine.submit(Prompt(0, 0, {}), WORKFLOW)
    with pytest.raises(RolloutError, match=r"ZeroDivisionError"):
        engine.wait(1, should_accept=lambda rows: 1 / 0)
    assert count(engine, "failed") == 1
    assert count(engine, "rejected") == 0


def test_one_raising_episode_is_contained(engines: Any) -> None:
    engine = engines(batch_size=8)
    for i in range(8):
        engine.submit(Prompt(0, i, {"act": fail} if i == 3 else {}), WORKFLOW)
    assert ids_of(engine.wait(7)) == [0, 1, 2, 4, 5, 6, 7]
    assert count(engine, "failed") == 1


def test_keyboard_interrupt_in_an_episode_reaches_the_waiting_caller(engines: Any) -> None:
    def interrupt(episode: Any) -> None:
        raise KeyboardInterrupt

    engine = engines()
    engine.submit(Prompt(0, 0, {"act": interrupt}), WORKFLOW)
    with pytest.raises(KeyboardInterrupt):
        engine.wait(1)


def test_cancellation_passes_through_a_workflow_and_is_not_a_failure(engines: Any) -> None:
    backend = GatedBackend()
    backend.allow(lambda req, made: False)
    engine = engines(backend)
    engine.submit(Prompt(0, 0, {}), WORKFLOW)
    backend.wait_requests(1)
    engine.destroy()
    assert backend.aborted == ["0.0.0"]
    assert count(engine, "failed") == 0


def test_the_fault_budget_ends_in_an_error_with_the_first_traceback(engines: Any) -> None:
    engine = engines(batch_size=2, max_failures_in_row=3)
    with pytest.raises(RolloutError, match=r"(?s)[3-6] episodes failed in a row.*bad episode 0"):
        engine.prepare_batch(Prompts(act=fail), WORKFLOW)


def test_a_success_starts_the_fault_budget_anew(engines: Any) -> None:
    engine = engines(batch_size=2, max_failures_in_row=2, max_concurrent=1)
    source = Prompts(act=lambda episode: fail(episode) if episode.episode_id % 2 == 0 else None)
    assert ids_of(engine.prepare_batch(source, WORKFLOW)) == [1, 3]


def test_only_rejections_end_in_no_informative_group(engines: Any) -> None:
    backend = GatedBackend()
    engine = engines(backend, batch_size=2, max_staleness=0, max_rejected_in_row=6)
    with pytest.raises(RolloutError, match="no informative group: 6 episodes"):
        engine.prepare_batch(Prompts(), WORKFLOW, should_accept=lambda rows: False)
    assert len(backend.requests) == 6


def test_a_misconfiguration_is_not_swallowed_as_a_bad_sample(engines: Any) -> None:
    def refuse(episode: Any) -> None:
        raise ConfigError("gconfig.top_k: not honoured")

    engine = engines()
    with pytest.raises(ConfigError, match="top_k"):
        engine.prepare_batch(Prompts(act=refuse), WORKFLOW)


def test_the_deadline_cancels_and_fails_an_episode(engines: Any) -> None:
    backend = GatedBackend()
    backend.allow(lambda req, made: not req.rid.startswith("0."))
    engine = engines(backend, episode_timeout_s=0.2)
    for i in range(2):
        engine.submit(Prompt(0, i, {}), WORKFLOW)
    with pytest.raises(RolloutError, match="did not end within"):
        engine.wait(2)
    assert ids_of(engine.wait(1)) == [1]
    engine.destroy()
    assert backend.aborted == ["0.0.0"]


def test_a_late_result_of_an_old_attempt_is_ignored_and_counted(engines: Any) -> None:
    """The first attempt outlives its deadline and its cancellation; the second answers at once."""
    late_may_end = asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def stubborn(episode: Any) -> None:
        if episode.attempt > 0:
            return
        loops.append(asyncio.get_running_loop())
        while not late_may_end.is_set():
            try:
                await late_may_end.wait()
            except asyncio.CancelledError:
                continue

    backend = GatedBackend()
    engine = engines(backend, episode_timeout_s=0.2)
    prompt = Prompt(0, 4, {"act": stubborn})
    engine.submit(prompt, WORKFLOW)
    wait_until(engine, lambda: count(engine, "failed") == 1)
    engine.submit(prompt, WORKFLOW)
    batch = engine.wait(1)
    assert (ids_of(batch), batch["attempt"].tolist()) == ([4], [1])
    loops[0].call_soon_threadsafe(late_may_end.set)
    wait_until(engine, lambda: engine.executor._loop.num_late == 1)
    assert [req.rid for req in backend.requests] == ["4.1.0", "4.0.0"]
    assert engine.take_metrics()["rollout/late"] == 1
    with pytest.raises(RolloutError, match="can no longer be reached"):
        engine.wait(1)


def test_submitting_an_open_id_again_supersedes_the_first_attempt(engines: Any) -> None:
    backend = GatedBackend()
    backend.allow(lambda req, made: req.rid == "0.1.0")
    engine = engines(backend)
    records: list[Any] = []
    workflow = WORKFLOW.with_listener(records.append)
    engine.submit(Prompt(0, 0, {}), workflow)
    backend.wait_requests(1)
    engine.submit(Prompt(0, 0, {}), workflow)
    assert engine.wait(1)["attempt"].tolist() == [1]
    assert count(engine, "superseded") == 1
    assert [(r.attempt, r.state, r.reason) for r in records if r.state != "ready"] == [
        (0, "superseded", "submitted again")
    ]


def test_while_paused_nothing_starts_and_finished_work_is_collected(engines: Any) -> None:
    backend = GatedBackend()
    engine = engines(backend, batch_size=4)
    engine.submit(Prompt(0, 0, {}), WORKFLOW)
    wait_until(engine, lambda: count(engine, "ready") == 1)
    engine.pause()
    engine.submit(Prompt(0, 1, {}), WORKFLOW)
    assert ids_of(engine.wait(1)) == [0]
    with pytest.raises(TimeoutError, match="paused"):
        engine.wait(1, timeout=0.05)
    assert len(backend.requests) == 1
    engine.resume()
    assert ids_of(engine.wait(1)) == [1]


def test_rollout_batch_works_while_paused_and_stays_out_of_the_ledger(engines: Any) -> None:
    engine = engines()
    engine.pause()
    batch = engine.rollout_batch([Prompt(0, i, {}) for i in (5, 3, 4)], WORKFLOW)
    assert ids_of(batch) == [5, 3, 4]
    assert engine.executor.ledger.submitted == 0
    assert engine.executor.ledger.capacity() == 4


def test_rollout_batch_keeps_seven_of_eight_and_records_the_failure(engines: Any) -> None:
    engine = engines()
    records: list[Any] = []
    data = [Prompt(0, i, {"act": fail} if i == 3 else {}) for i in range(8)]
    batch = engine.rollout_batch(data, WORKFLOW.with_listener(records.append))
    assert ids_of(batch) == [0, 1, 2, 4, 5, 6, 7]
    failed = [record for record in records if record.state == "failed"]
    assert [(r.episode_id, r.reason) for r in failed] == [(3, "ValueError: bad episode 3")]
    assert len(records) == 8


def test_rollout_batch_without_any_good_episode_is_an_error(engines: Any) -> None:
    engine = engines()
    with pytest.raises(RolloutError, match=r"(?s)no episode ended well.*bad episode"):
        engine.rollout_batch([Prompt(0, 0, {"act": fail})], WORKFLOW)
    with pytest.raises(DataError, match="no episodes"):
        engine.rollout_batch([], WORKFLOW)


def test_samples_of_two_episodes_never_share_a_number(engines: Any) -> None:
    batch = engines().rollout_batch([{}, {}, {}], WORKFLOW)
    assert batch["sample_ids"].tolist() == [0, 1, 2]
    assert len(set(batch["group_ids"].tolist())) == 3


WRONG_ROWS = {
    "type": (lambda rows: [1], "got list"),
    "missing key": (lambda rows: rows.exclude("versions"), "versions is missing"),
    "wrong shape": (
        lambda rows: rows.set("logprobs", torch.zeros(1, 9)),
        r"logprobs has shape \[1, 9\]",
    ),
    "wrong dtype": (lambda rows: rows.set("rewards", torch.ones(1).double()), "rewards is"),
    "infinite reward": (
        lambda rows: rows.set("rewards", torch.tensor([float("inf")])),
        "a reward is infinite",
    ),
    "wrong temperature": (
        lambda rows: rows.set("temperature", torch.ones(2)[None]),
        r"temperature has another shape than \[1\]",
    ),
    "no version": (
        lambda rows: rows.set("versions", rows["versions"] * 0 - 1),
        "a trained token has no version",
    ),
    "first token": (
        lambda rows: rows.set("loss_mask", torch.ones_like(rows["loss_mask"])),
        "covers token 0",
    ),
}


def test_rows_without_a_temperature_were_sampled_at_the_configured_one(engines: Any) -> None:
    engine = engines(generation={"temperature": 0.7})
    engine.submit({}, WORKFLOW)
    batch = engine.wait(1)
    assert batch["temperature"].tolist() == [pytest.approx(0.7)]
    assert batch["truncated"].tolist() == [False]


@pytest.mark.parametrize("name", WRONG_ROWS)
def test_wrong_rows_fail_the_episode_and_say_why(engines: Any, name: str) -> None:
    spoil, message = WRONG_ROWS[name]

    class Spoiling(OneRow):
        async def arun_episode(self, engine: Any, data: Any) -> Any:
            return spoil(await super().arun_episode(engine, data))

    engine = engines()
    engine.submit({}, Spoiling())
    with pytest.raises(RolloutError, match=message):
        engine.wait(1)
    assert count(engine, "failed") == 1


def test_set_version_consumes_the_batch_and_frees_its_places(engines: Any) -> None:
    engine = engines(max_staleness=0)
    engine.prepare_batch(Prompts(), WORKFLOW)
    assert engine.executor.ledger.capacity() == 0
    publish(engine)
    assert count(engine, "consumed") == 2
    assert engine.executor.ledger.capacity() == 2


def test_set_version_refuses_a_version_that_is_not_served(engines: Any) -> None:
    engine = engines()
    with pytest.raises(WeightSyncError, match="serves version 0"):
        engine.set_version(1)


def test_a_trainers_rejection_frees_the_place(engines: Any) -> None:
    engine = engines(max_staleness=0)
    batch = engine.prepare_batch(Prompts(), WORKFLOW)
    engine.reject([ids_of(batch)[0]], "zero variance")
    assert (count(engine, "rejected"), count(engine, "in_training")) == (1, 1)
    with pytest.raises(DataError, match="99"):
        engine.reject([99], "unknown")


def test_a_listener_that_raises_stops_the_run(engines: Any) -> None:
    def broken(record: Any) -> None:
        raise OSError("disk full")

    engine = engines()
    engine.submit({}, WORKFLOW.with_listener(broken))
    wait_until(engine, lambda: engine.executor._loop.fatal is not None)
    with pytest.raises(OSError, match="disk full"):
        engine.wait(1)


def test_calls_before_initialize_and_after_destroy_are_errors(engines: Any) -> None:
    engine = engines()
    engine.destroy()
    engine.destroy()
    with pytest.raises(EngineError, match="destroyed"):
        engine.submit({}, WORKFLOW)
    with pytest.raises(EngineError):
        engine.wait(1)


def test_destroy_wakes_a_waiting_thread(engines: Any) -> None:
    backend = GatedBackend()
    backend.allow(lambda req, made: False)
    engine = engines(backend)
    engine.submit({}, WORKFLOW)
    backend.wait_requests(1)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            engine.wait(1)
        except EngineError as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    engine.destroy()
    thread.join(TIMEOUT_S)
    assert len(raised) == 1


def test_destroy_closes_the_backend_behind_a_rollout_thread_that_is_blocked(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.rollout.loop.CLOSE_TIMEOUT_S", 0.1)
    free, entered = threading.Event(), threading.Event()

    def block(episode: Any) -> None:
        entered.set()
        free.wait(TIMEOUT_S)

    backend = GatedBackend()
    engine = engines(backend)
    engine.submit({"act": block}, WORKFLOW)
    assert entered.wait(TIMEOUT_S)
    engine.destroy()
    assert backend.is_closed
    free.set()


def test_describe_names_states_ages_and_what_runs(engines: Any) -> None:
    backend = GatedBackend()
    backend.allow(lambda req, made: False)
    engine = engines(backend, max_concurrent=1)
    for i in range(2):
        engine.submit(Prompt(0, i, {}), WORKFLOW)
    backend.wait_requests(1)
    text = engine.describe()
    for part in ("version 0", "queued 1, running 1", "capacity 0", "episode 0 attempt 0", "head"):
        assert part in text


def test_versions_of_tokens_survive_an_update_in_mid_sequence(engines: Any) -> None:
    backend = GatedBackend(script=lambda req: [4, 5, 6, 7, 2])
    engine = engines(backend, max_staleness=2)
    backend.commit(3)
    backend.allow(lambda req, made: made < 2)
    engine.submit(Prompt(0, 0, {}), WORKFLOW)
    backend.wait_requests(1)
    backend.wait_held(1)
    backend.commit(4)
    backend.allow(lambda req, made: True)
    wait_until(engine, lambda: count(engine, "ready") == 1)
    backend.commit(5)
    batch = engine.wait(1)
    assert batch["versions"].tolist() == [[-1, -1, 3, 3, 4, 4, 4]]
    metrics = engine.take_metrics()
    assert metrics["staleness/max"] == 2
    assert metrics["staleness/mean"] == pytest.approx((2 + 2 + 1 + 1 + 1) / 5)


def test_publishing_a_version_aborts_nothing_that_a_pause_kept(engines: Any) -> None:
    backend = GatedBackend(script=lambda req: [4, 2])
    backend.allow(lambda req, made: made < 1)
    engine = engines(backend, batch_size=16)
    for i in range(16):
        engine.submit(Prompt(0, i, {}), WORKFLOW)
    backend.wait_held(16)
    engine.pause_generation()
    publish(engine)
    backend.allow(lambda req, made: True)
    engine.resume_generation()
    batch = engine.wait(16)
    assert backend.aborted == []
    assert len(backend.finished) == 16
    assert batch["versions"][:, 2:].tolist() == [[0, 1]] * 16


def test_states_add_up_in_a_storm_of_failures_rejections_and_stale_drops() -> None:
    draw = random.Random(3)

    def act(episode: Any) -> Any:
        chance = draw.random()
        if chance < 0.2:
            fail(episode)
        return "reject" if chance < 0.4 else None

    engine = make_engine(
        batch_size=3, max_staleness=1, stale_policy="drop", max_failures_in_row=1000
    )
    source = Prompts(7, act=act)
    try:
        for _ in range(40):
            batch = engine.prepare_batch(source, WORKFLOW, lambda rows: draw.random() < 0.8)
            lag = engine.get_version() - batch["versions"][batch["loss_mask"]]
            assert int(lag.max()) <= 1
            if draw.random() < 0.3:
                engine.reject(ids_of(batch)[:1], "drawn")
            for _ in range(draw.choice([1, 1, 2])):
                publish(engine)
            ledger = engine.executor.ledger
            assert sum(ledger.counts().values()) == ledger.submitted
        counts = engine.executor.ledger.counts()
        assert all(counts[name] for name in ("consumed", "rejected", "failed", "stale"))
    finally:
        engine.destroy()
