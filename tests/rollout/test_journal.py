"""What the executor writes into the trajectory store, and what it takes from it after a resume."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tandem.data.batch import collate
from tandem.errors import DataError, StoreError
from tandem.rollout.composed import ComposedInferenceEngine
from tandem.rollout.encoding import pack_rows, unpack_rows
from tandem.rollout.rows import PER_ROW, check_rows
from tandem.rollout.runs import FIRST_FREE_ID
from tandem.store import MemoryStore, Moved, StoredEpisode, StoreWriter
from tandem.store.records import Change
from tandem.types import EpisodeState, LLMRequest, Prompt
from tests.rollout.doubles import (
    TIMEOUT_S,
    GatedBackend,
    OneRow,
    Prompts,
    count,
    make_engine,
    one_row,
    publish,
    wait_until,
)

WORKFLOW = OneRow()
Make = Callable[..., ComposedInferenceEngine]


@pytest.fixture
def kept() -> Iterator[Make]:
    """``kept(store, backend, **rollout)`` makes an engine that writes into ``store``."""
    engines: list[ComposedInferenceEngine] = []
    writers: list[StoreWriter] = []

    def make(
        store: MemoryStore, backend: GatedBackend | None = None, **rollout: Any
    ) -> ComposedInferenceEngine:
        writers.append(StoreWriter(store, f"start{len(writers)}"))
        engines.append(make_engine(backend, writer=writers[-1], **rollout))
        return engines[-1]

    yield make
    for engine in engines:
        engine.destroy()
    for writer in writers:
        writer.close()


def flush(engine: ComposedInferenceEngine) -> None:
    engine.executor._pipeline.journal._writer.flush()  # type: ignore[union-attr]


def states(store: MemoryStore) -> dict[tuple[int, int], str]:
    return {(e.episode_id, e.attempt): e.state.value for e in store.find()}


def ids(batch: Any) -> list[int]:
    return list(dict.fromkeys(batch["episode_ids"].tolist()))


def number(position: int, **data: Any) -> Prompt:
    return Prompt(0, position, {"prompt_ids": (10 + position, 3), **data})


# --- writing --------------------------------------------------------------------------------------


class HeldStore(MemoryStore):
    """Keeps no episode before ``gate`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.entered = threading.Event(), threading.Event()

    def write(self, changes: Sequence[Change]) -> None:
        if any(isinstance(change, StoredEpisode) for change in changes):
            self.entered.set()
            assert self.gate.wait(TIMEOUT_S)
        super().write(changes)


def test_an_episode_is_ready_only_when_its_rows_are_kept(kept: Make) -> None:
    store = HeldStore()
    engine = kept(store)
    engine.submit(number(0), WORKFLOW)
    assert store.entered.wait(TIMEOUT_S)
    assert count(engine, "ready") == 0
    assert count(engine, "running") == 1
    assert "1 that the store has yet to keep" in engine.executor.describe()
    store.gate.set()
    batch = engine.wait(1)
    assert ids(batch) == [0]
    flush(engine)
    assert states(store) == {(0, 0): "in_training"}


def test_another_episode_runs_while_the_rows_of_one_are_being_kept(kept: Make) -> None:
    store = HeldStore()
    engine = kept(store, max_concurrent=1, max_staleness=0, batch_size=3)
    for position in range(4):
        engine.submit(number(position), WORKFLOW)
    wait_until(engine, lambda: engine.executor.ledger.num_unkept == 3)
    assert count(engine, "ready") == 0
    assert count(engine, "queued") == 1  # the staleness rule counts what is not kept yet
    assert engine.executor.ledger.capacity() == 0
    store.gate.set()
    assert ids(engine.wait(3)) == [0, 1, 2]


def test_rows_that_a_caller_waits_for_are_kept_at_once(
    kept: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.store.writer.GATHER_S", 10 * TIMEOUT_S)
    engine = kept(MemoryStore(), batch_size=2)
    engine.submit(number(0), WORKFLOW)
    wait_until(engine, lambda: engine.executor.ledger.num_unkept == 1)  # nobody waits for it
    assert ids(engine.wait(1, timeout=TIMEOUT_S)) == [0]
    pipeline, release = engine.executor._pipeline, threading.Event()
    await_ready = pipeline.await_ready

    def told(num: int | None) -> None:  # under the lock, which is free when the caller sleeps
        await_ready(num)
        release.set()

    def when_released(_: Any) -> None:
        assert release.wait(TIMEOUT_S)

    monkeypatch.setattr(pipeline, "await_ready", told)
    engine.submit(number(1, act=when_released), WORKFLOW)
    assert ids(engine.wait(1, timeout=TIMEOUT_S)) == [1]  # it ends while the caller sleeps


def test_every_end_of_an_episode_is_in_the_store_with_its_reason(kept: Make) -> None:
    store = MemoryStore()
    engine = kept(store, batch_size=4)

    def fail(_: Any) -> None:
        raise ValueError("broken")

    engine.submit(number(0), WORKFLOW)
    engine.submit(number(1, act=fail), WORKFLOW)
    engine.submit(number(2, act=lambda _: "reject"), WORKFLOW)
    engine.wait(1)
    engine.submit(number(3), WORKFLOW)
    wait_until(engine, lambda: count(engine, "ready") == 1)
    engine.reject([3], "not wanted")
    publish(engine)
    flush(engine)
    assert states(store) == {
        (0, 0): "consumed",
        (1, 0): "failed",
        (2, 0): "rejected",
        (3, 0): "rejected",
    }
    by_id = {e.episode_id: e for e in store.find()}
    assert by_id[1].reason == "ValueError: broken"
    assert by_id[2].reason == "the workflow returned None"
    assert by_id[3].reason == "not wanted"
    assert (by_id[0].step, by_id[0].closed_version) == (1, 1)
    assert (by_id[0].reward, by_id[0].num_rows, by_id[0].num_tokens) == (1.0, 1, 2)
    assert (by_id[0].oldest_version, by_id[0].newest_version) == (0, 0)
    assert [span["name"] for span in store.content(by_id[0].key).spans] == ["generate"]
    assert store.content(by_id[3].key).rows is not None
    assert sum(engine.executor.ledger.counts().values()) == len(store.find())


def test_a_stale_episode_and_a_superseded_attempt_are_told_apart(kept: Make) -> None:
    store, backend = MemoryStore(), GatedBackend()
    engine = kept(store, backend, stale_policy="drop")
    engine.submit(number(0), WORKFLOW)
    wait_until(engine, lambda: count(engine, "ready") == 1)
    for _ in range(2):
        publish(engine)
    backend.allow(lambda req, made: not req.rid.startswith("1.0"))
    engine.submit(number(1), WORKFLOW)
    backend.wait_held(1)
    engine.submit(number(1), WORKFLOW)
    assert ids(engine.wait(1)) == [1]
    flush(engine)
    assert states(store) == {(0, 0): "stale", (1, 0): "superseded", (1, 1): "in_training"}
    reasons = {e.state: e.reason for e in store.find()}
    assert reasons[EpisodeState.STALE] == "older than 1 versions at version 2"
    assert reasons[EpisodeState.SUPERSEDED] == "submitted again"


def test_the_schedule_names_dispatches_and_batches_in_order(kept: Make) -> None:
    store = MemoryStore()
    engine = kept(store)
    for position in range(3):
        engine.submit(number(position), WORKFLOW)
    wait_until(engine, lambda: count(engine, "ready") == 3)
    batch = engine.wait(2)
    flush(engine)
    begun = [item for event in store.events("dispatch") for item in event.detail["attempts"]]
    assert {event.detail["lease_s"] for event in store.events("dispatch")} == {TIMEOUT_S}
    assert begun == [[0, 0], [1, 0], [2, 0]]
    (handed,) = store.events("batch")
    assert [member[0] for member in handed.detail["members"]] == ids(batch)
    keys = {e.episode_id: e.key for e in store.find()}
    assert [member[2] for member in handed.detail["members"]] == [keys[i] for i in ids(batch)]
    assert handed.version == 0


def test_a_store_that_fails_ends_every_wait_with_its_error(kept: Make) -> None:
    class Full(MemoryStore):
        def write(self, changes: Sequence[Change]) -> None:
            if any(isinstance(change, StoredEpisode) for change in changes):
                raise StoreError("disk full")
            super().write(changes)

    engine = kept(Full())
    engine.submit(number(0), WORKFLOW)
    with pytest.raises(StoreError, match="disk full"):
        engine.wait(1)


def test_evaluation_is_not_stored(kept: Make) -> None:
    store = MemoryStore()
    engine = kept(store)
    engine.rollout_batch([number(0)], WORKFLOW)
    flush(engine)
    assert store.find() == []
    assert store.events() == []


# --- resuming -------------------------------------------------------------------------------------


def train(engine: ComposedInferenceEngine, source: Prompts, steps: int) -> list[list[int]]:
    batches = []
    for _ in range(steps):
        batches.append(ids(engine.prepare_batch(source, WORKFLOW)))
        publish(engine)
    return batches


def resumed(kept: Make, store: MemoryStore, state: Any, **rollout: Any) -> ComposedInferenceEngine:
    backend = GatedBackend()
    backend.commit(state["version"])
    engine = kept(store, backend, **rollout)
    engine.load_state_dict(state)
    return engine


def test_rows_that_are_not_newer_than_the_checkpoint_are_trained_without_running_again(
    kept: Make,
) -> None:
    store, source = MemoryStore(), Prompts()
    first = kept(store)
    before = train(first, source, 2)
    state = first.state_dict()
    # Version 2 makes these rows; they are trained on and consumed after the checkpoint.
    lost = train(first, source, 1)[0]
    wait_until(first, lambda: count(first, "running") == 0)
    first.destroy()
    flush(first)
    usable = {e.episode_id for e in store.find() if (e.newest_version or 0) <= 2}

    second = resumed(kept, store, state)
    backend = second.backend
    after = train(second, source, 4)
    flush(second)
    assert after[0] == lost
    trained = [i for batch in before + after for i in batch]
    assert len(trained) == len(set(trained)) == 12
    again = {int(request.rid.split(".")[0]) for request in backend.requests}  # type: ignore[attr-defined]
    assert not again & usable
    consumed = [e.episode_id for e in store.find() if e.state is EpisodeState.CONSUMED]
    assert sorted(consumed) == sorted(trained)


def test_rows_with_tokens_newer_than_the_checkpoint_run_again_as_the_next_attempt(
    kept: Make,
) -> None:
    store, source = MemoryStore(), Prompts()
    first = kept(store)
    state = first.state_dict()
    train(first, source, 3)
    wait_until(first, lambda: count(first, "running") == 0)
    first.destroy()
    flush(first)
    newer = {e.episode_id for e in store.find() if (e.newest_version or 0) > 0}
    assert newer

    second = resumed(kept, store, state)
    train(second, source, 6)
    flush(second)
    by_attempt = states(store)
    for episode_id in newer:
        assert by_attempt[episode_id, 0] == "superseded"
        assert (episode_id, 1) in by_attempt


def test_a_synchronous_run_makes_its_batches_again(kept: Make) -> None:
    store, source = MemoryStore(), Prompts()
    first = kept(store, max_staleness=0)
    state = first.state_dict()
    lost = train(first, source, 2)
    first.destroy()
    second = resumed(kept, store, state, max_staleness=0)
    assert train(second, source, 2) == lost
    flush(second)
    for episode_id in {i for batch in lost for i in batch}:
        assert states(store)[episode_id, 0] == "superseded"
        assert states(store)[episode_id, 1] == "consumed"


def test_an_unfinished_episode_gets_a_new_attempt_and_draws_the_same_seed(kept: Make) -> None:
    class Unseeded(OneRow):
        async def arun_episode(self, engine: Any, data: Any) -> Any:
            response = await engine.agenerate(LLMRequest(f"{data.uid}.turn0", (5, 6)))
            return one_row((5, 6), response)

    store = MemoryStore()
    backend = GatedBackend()
    backend.allow(lambda req, made: False)
    first = kept(store, backend)
    state = first.state_dict()
    first.submit(number(7), Unseeded())
    backend.wait_held(1)
    first.destroy()
    flush(first)

    second = resumed(kept, store, state)
    second.submit(number(7), Unseeded())
    second.wait(1)
    flush(second)
    assert states(store) == {(7, 1): "in_training"}
    (before,), (after,) = backend.requests, second.backend.requests  # type: ignore[attr-defined]
    assert before.rid != after.rid
    assert before.gconfig.seed == after.gconfig.seed


def test_what_was_dropped_as_stale_after_the_checkpoint_is_used_when_it_is_fresh_enough(
    kept: Make,
) -> None:
    store = MemoryStore()
    first = kept(store, stale_policy="drop")
    state = first.state_dict()
    first.submit(number(0), WORKFLOW)
    wait_until(first, lambda: count(first, "ready") == 1)
    for _ in range(3):
        publish(first)
    first.submit(number(1), WORKFLOW)
    assert ids(first.wait(1)) == [1]
    first.destroy()
    flush(first)
    assert states(store)[0, 0] == "stale"

    second = resumed(kept, store, state, stale_policy="drop")
    second.submit(number(0), WORKFLOW)
    assert ids(second.wait(1)) == [0]
    flush(second)
    assert states(store)[0, 0] == "in_training"


def test_episodes_of_plain_mappings_are_not_taken_from_the_store(kept: Make) -> None:
    store = MemoryStore()
    first = kept(store)
    state = first.state_dict()
    first.submit({"prompt_ids": (9, 9)}, WORKFLOW)
    wait_until(first, lambda: count(first, "ready") == 1)
    first.destroy()
    second = resumed(kept, store, state)
    assert second.submit({"prompt_ids": (8, 8)}, WORKFLOW) == FIRST_FREE_ID
    assert second.wait(1)["input_ids"].tolist() == [[8, 8, 7, 2]]
    flush(second)
    assert states(store) == {(FIRST_FREE_ID, 0): "superseded", (FIRST_FREE_ID, 1): "in_training"}


def test_a_checkpoint_that_was_resumed_can_be_resumed_again(kept: Make) -> None:
    """Three starts from one checkpoint, each cut short at another place."""
    store, source = MemoryStore(), Prompts()
    engine = kept(store)
    state = engine.state_dict()
    for steps in (1, 3, 2):
        train(engine, source, steps)
        engine.destroy()
        flush(engine)
        engine = resumed(kept, store, state)
    trained = [i for batch in train(engine, source, 5) for i in batch]
    flush(engine)
    consumed = [e.episode_id for e in store.find() if e.state is EpisodeState.CONSUMED]
    assert sorted(consumed) == sorted(trained)
    assert len(set(trained)) == 10
    pairs = list(states(store))
    assert len(pairs) == len(store.find())


# --- rows as bytes --------------------------------------------------------------------------------


def rows() -> Any:
    made = collate(
        [
            {
                "input_ids": torch.tensor([5, 6, 7]),
                "loss_mask": torch.tensor([False, True, True]),
                "logprobs": torch.tensor([0.0, -0.1, -1e-30]),
                "versions": torch.tensor([-1, 3, 4]),
                "rewards": torch.tensor(float("nan")),
                "half": torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16),
                "int32": torch.tensor([1, 2, 3], dtype=torch.int32),
            },
            {
                "input_ids": torch.tensor([5]),
                "loss_mask": torch.tensor([False]),
                "logprobs": torch.tensor([0.0]),
                "versions": torch.tensor([-1]),
                "rewards": torch.tensor(0.1),
                "half": torch.tensor([1.0], dtype=torch.bfloat16),
                "int32": torch.tensor([1], dtype=torch.int32),
            },
        ]
    )
    return check_rows(made, 1 << 41, 3)[0]


def test_rows_survive_as_bytes_in_every_bit_and_dtype() -> None:
    before = rows()
    after = unpack_rows(pack_rows(before), episode_id=1 << 41, attempt=3)
    assert set(after.keys()) == set(before.batch().keys())
    for name, tensor in before.batch().items():
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name].nan_to_num(9.0), tensor.nan_to_num(9.0)), name


def test_tokens_take_four_bytes_and_any_safetensors_reader_has_them() -> None:
    from safetensors.torch import load

    tensors = load(pack_rows(rows()))
    assert tensors["input_ids"].dtype == torch.int32
    assert tensors["input_ids"].tolist() == [[5, 6, 7], [5, 0, 0]]
    assert tensors["versions"].tolist() == [[-1, 3, 4], [-1, -1, -1]]
    assert "episode_ids" not in tensors


def test_a_token_that_needs_more_than_four_bytes_keeps_them() -> None:
    made = rows()
    made.tensors["input_ids"] = made.tensors["input_ids"] + (1 << 40)
    after = unpack_rows(pack_rows(made), episode_id=0, attempt=0)
    assert torch.equal(after["input_ids"], made.tensors["input_ids"])


def test_bytes_are_a_header_and_every_column_in_the_order_of_their_names() -> None:
    made = rows()
    columns = dict(sorted(made.with_columns(PER_ROW).items()))
    for name in ("input_ids", "versions"):
        columns[name] = columns[name].to(torch.int32)
    names = {torch.bool: "BOOL", torch.int32: "I32", torch.int64: "I64", torch.bfloat16: "BF16"}
    header: dict[str, Any] = {}
    body = b""
    for name, column in columns.items():
        data = bytes(column.contiguous().view(torch.uint8).flatten().tolist())
        kind, offsets = names.get(column.dtype, "F32"), [len(body), len(body) + len(data)]
        header[name] = {"dtype": kind, "shape": list(column.shape), "data_offsets": offsets}
        body += data
    packed = pack_rows(made)
    start = 8 + int.from_bytes(packed[:8], "little")
    assert start % 8 == 0
    assert list(json.loads(packed[8:start]).items()) == list(header.items())
    assert packed[start:] == body


@pytest.mark.parametrize("given", [(), ("sample_ids", "truncated"), tuple(PER_ROW)])
def test_columns_that_were_left_out_are_in_the_bytes(given: tuple[str, ...]) -> None:
    expected = {
        "group_ids": torch.tensor([1 << 41] * 3),
        "sample_ids": torch.tensor([0, 1, 2]),
        "truncated": torch.tensor([False] * 3),
        "temperature": torch.tensor([0.7] * 3),
    }
    tokens = torch.ones(3, 2, dtype=torch.int64)
    made = TensorDict(
        {
            "input_ids": tokens,
            "attention_mask": tokens > 0,
            "loss_mask": tokens < 0,
            "logprobs": torch.zeros(3, 2),
            "versions": -tokens,
            "rewards": torch.zeros(3),
            **{name: expected[name] for name in given},
        },
        batch_size=[3],
    )
    checked, _ = check_rows(made, 1 << 41, 0, temperature=0.7)
    after = unpack_rows(pack_rows(checked), episode_id=1 << 41, attempt=0)
    for name, column in expected.items():
        assert after[name].dtype == column.dtype, name
        assert torch.equal(after[name], column), name


@pytest.mark.parametrize("token", [(1 << 31) - 1, 1 << 31, -(1 << 31), -(1 << 31) - 1])
def test_tokens_keep_their_value_at_the_border_of_four_bytes(token: int) -> None:
    made = rows()
    made.tensors["input_ids"] = torch.full_like(made.tensors["input_ids"], token)
    packed = pack_rows(made)
    start = 8 + int.from_bytes(packed[:8], "little")
    kind = json.loads(packed[8:start])["input_ids"]["dtype"]
    assert kind == ("I32" if -(1 << 31) <= token < 1 << 31 else "I64")
    after = unpack_rows(packed, episode_id=0, attempt=0)
    assert after["input_ids"].unique().tolist() == [token]


def test_rows_that_cannot_be_stored_say_so() -> None:
    made = rows()
    made.tensors["wave"] = torch.zeros(2, dtype=torch.complex64)
    with pytest.raises(DataError, match="wave"):
        pack_rows(made)


@pytest.mark.parametrize("cut", [0, 7, 100, -1])
def test_damaged_rows_are_a_store_error(cut: int) -> None:
    with pytest.raises(StoreError, match="episode 4 attempt 2"):
        unpack_rows(pack_rows(rows())[:cut], episode_id=4, attempt=2)


def test_moving_a_batch_that_the_store_does_not_know_is_an_error() -> None:
    store = MemoryStore()
    with pytest.raises(StoreError):
        store.write([Moved((1,), EpisodeState.IN_TRAINING, version=0)])
