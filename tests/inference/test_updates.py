"""New weights between two tokens: versions, caches, refusals, timeouts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem.errors import EngineError, WeightSyncError
from tandem.inference.embedded import EmbeddedBackend
from tandem.inference.embedded.core import EmbeddedCore
from tandem.inference.updates import PendingUpdate
from tandem.types import LLMResponse, ParamSpec, WeightUpdateMeta, WeightVersion
from tandem.weights import Published, expect, publish, release

from .conftest import MakeCore, commit, drain, request, run

CHANNEL = "test-updates"


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    yield
    release(CHANNEL)


def update_meta(
    version: int, *, type: str = "inprocess", dtype: str | None = None
) -> WeightUpdateMeta:
    return WeightUpdateMeta(type, version, incarnation="inc", channel=CHANNEL, dtype=dtype)


def send(meta: WeightUpdateMeta, weights: Mapping[str, Tensor]) -> None:
    specs = [
        ParamSpec(name, tuple(item.shape), str(item.dtype).removeprefix("torch."))
        for name, item in weights.items()
    ]
    publish(meta, specs, weights.items())


def published(version: int, weights: Mapping[str, Tensor]) -> Published:
    meta = update_meta(version)
    arrival = expect(meta)
    send(meta, weights)
    return arrival.result(0)


def snapshot(core: EmbeddedCore) -> dict[str, Tensor]:
    return {name: item.detach().clone() for name, item in core.weights.parameters.items()}


def assert_unchanged(core: EmbeddedCore, before: Mapping[str, Tensor], version: int) -> None:
    assert core.version == WeightVersion("inc", version)
    for name, item in core.weights.parameters.items():
        assert torch.equal(item, before[name])


def generate(
    core: EmbeddedCore, weights: Mapping[str, Tensor], *, update_after: int, count: int = 5
) -> LLMResponse:
    """One request from version 3 on, updated to version 4 after ``update_after`` tokens."""
    core.set_version(WeightVersion("inc", 3))
    core.add(0, request((5, 6, 7), seed=8, max_new_tokens=count, ignore_eos=True))
    for _ in range(update_after):
        core.step()
    commit(core, published(4, weights))
    return drain(core, 1)[0]


@pytest.mark.parametrize("kv_on_update", ["recompute", "keep"])
def test_tokens_carry_the_version_that_made_them(
    make_core: MakeCore, other_weights: Mapping[str, Tensor], kv_on_update: str
) -> None:
    response = generate(make_core(kv_on_update=kv_on_update), other_weights, update_after=2)
    assert response.output_versions == [3, 3, 4, 4, 4]
    assert len(response.output_tokens) == len(response.output_logprobs) == 5
    assert response.stop_reason == "length"


def test_recompute_continues_as_a_fresh_engine_with_the_new_weights(
    make_core: MakeCore, other_weights: Mapping[str, Tensor], other_model_dir: Path
) -> None:
    response = generate(make_core(), other_weights, update_after=4, count=20)
    prefix = (5, 6, 7, *response.output_tokens[:4])
    fresh = make_core(other_model_dir)
    (expected,) = run(fresh, [request(prefix, seed=8, max_new_tokens=16, ignore_eos=True)])
    assert response.output_tokens[4:] == expected.output_tokens
    assert response.output_logprobs[4:] == pytest.approx(expected.output_logprobs, abs=1e-5)


def test_recompute_keeps_what_was_sampled_before(
    make_core: MakeCore, other_weights: Mapping[str, Tensor]
) -> None:
    item = request((5, 6, 7), seed=8, max_new_tokens=9, ignore_eos=True)
    (undisturbed,) = run(make_core(), [item])
    response = generate(make_core(), other_weights, update_after=4, count=9)
    assert response.output_tokens[:4] == undisturbed.output_tokens[:4]
    assert response.output_logprobs[:4] == undisturbed.output_logprobs[:4]


def test_keep_reads_old_keys_and_counts_such_tokens(
    make_core: MakeCore, other_weights: Mapping[str, Tensor]
) -> None:
    recomputed = generate(make_core(), other_weights, update_after=4, count=9)
    core = make_core(kv_on_update="keep")
    kept = generate(core, other_weights, update_after=4, count=9)
    assert core.counters.stale_kv_tokens == 5
    assert kept.output_logprobs[4] != recomputed.output_logprobs[4]
    assert len(run(core, [request((9, 8), max_new_tokens=3, ignore_eos=True)])) == 1
    assert core.counters.stale_kv_tokens == 5


@pytest.mark.parametrize("kv_on_update", ["recompute", "keep"])
def test_a_repeated_prompt_is_answered_with_the_new_weights(
    make_core: MakeCore,
    other_weights: Mapping[str, Tensor],
    other_model_dir: Path,
    kv_on_update: str,
) -> None:
    item = request(range(4, 30), seed=1, max_new_tokens=4, ignore_eos=True)
    core = make_core(kv_on_update=kv_on_update)
    (before,) = run(core, [item])
    commit(core, published(1, other_weights))
    (after,) = run(core, [item])
    (fresh,) = run(make_core(other_model_dir), [item])
    assert (before.output_versions[0], after.output_versions[0]) == (0, 1)
    assert after.output_logprobs == pytest.approx(fresh.output_logprobs, abs=1e-6)
    assert after.output_logprobs != pytest.approx(before.output_logprobs, abs=1e-3)


def test_an_update_of_many_running_requests_recomputes_all(
    make_core: MakeCore, other_weights: Mapping[str, Tensor], other_model_dir: Path
) -> None:
    core = make_core(max_batch_size=6)
    given = [
        request(range(4, 6 + i), seed=i, max_new_tokens=4 + i, ignore_eos=True) for i in range(10)
    ]
    for ticket, item in enumerate(given):
        core.add(ticket, item)
    for _ in range(3):
        core.step()
    commit(core, published(1, other_weights))
    fresh = make_core(other_model_dir)
    for item, response in zip(given, drain(core, 10), strict=True):
        made_before = response.output_versions.count(0)
        rest = len(response.output_tokens) - made_before
        prefix = (*item.input_ids, *response.output_tokens[:made_before])
        (expected,) = run(
            fresh,
            [request(prefix, seed=item.gconfig.seed, max_new_tokens=rest, ignore_eos=True)],
        )
        assert response.output_tokens[made_before:] == expected.output_tokens


def test_wrong_names_refuse_the_whole_update(
    make_core: MakeCore, other_weights: Mapping[str, Tensor]
) -> None:
    core = make_core()
    before = snapshot(core)
    renamed = {
        name.replace("model.norm.weight", "model.norm.weightX"): item
        for name, item in other_weights.items()
    }
    with pytest.raises(WeightSyncError) as caught:
        commit(core, published(1, renamed))
    assert "missing: model.norm.weight;" in str(caught.value)
    assert "unexpected: model.norm.weightX" in str(caught.value)
    assert_unchanged(core, before, 0)


def test_a_wrong_shape_or_dtype_refuses_the_whole_update(
    make_core: MakeCore, other_weights: Mapping[str, Tensor]
) -> None:
    core = make_core()
    before = snapshot(core)
    for changed in (torch.zeros(7), other_weights["model.norm.weight"].double()):
        with pytest.raises(WeightSyncError, match=r"model\.norm\.weight"):
            commit(core, published(1, {**other_weights, "model.norm.weight": changed}))
        assert_unchanged(core, before, 0)


def test_a_changed_byte_refuses_the_whole_update(
    make_core: MakeCore, other_weights: Mapping[str, Tensor]
) -> None:
    core = make_core()
    before = snapshot(core)
    damaged = published(1, other_weights)
    damaged.location.buffer.data[damaged.manifest.tensors[-1].offset] ^= 1
    with pytest.raises(WeightSyncError, match="sha256"):
        commit(core, damaged)
    assert_unchanged(core, before, 0)


def test_fp32_weights_may_be_served_in_bf16(
    make_core: MakeCore, other_weights: Mapping[str, Tensor]
) -> None:
    core = make_core(dtype="bfloat16")
    commit(core, published(1, other_weights))
    for name, item in core.weights.parameters.items():
        assert torch.equal(item, other_weights[name].bfloat16())


def test_bf16_weights_are_refused_by_an_fp32_engine(
    make_core: MakeCore, other_weights: Mapping[str, Tensor]
) -> None:
    core = make_core()
    half = {name: item.bfloat16() for name, item in other_weights.items()}
    with pytest.raises(WeightSyncError, match="dtype"):
        commit(core, published(1, half))


def test_tied_weights_are_one_tensor_of_the_update(core: EmbeddedCore) -> None:
    names = [spec.name for spec in core.weights.specs]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


# --- through the in-process backend ---


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def test_updates_never_abort_what_is_in_flight(
    make_backend: Callable[..., EmbeddedBackend], other_weights: Mapping[str, Tensor]
) -> None:
    backend = make_backend()

    async def scenario() -> list[LLMResponse]:
        tasks = [
            asyncio.create_task(
                backend.generate(request((5, 6), seed=i, max_new_tokens=100, ignore_eos=True))
            )
            for i in range(16)
        ]
        await until(lambda: backend.stats()["tokens"] >= 64)
        backend.pause_generation()
        held = backend.stats()["tokens"]
        future = backend.update_weights(update_meta(1))
        send(update_meta(1), other_weights)
        await asyncio.wrap_future(future)
        assert backend.stats()["tokens"] == held
        backend.resume_generation()
        return await asyncio.gather(*tasks)

    responses = asyncio.run(scenario())
    assert [r.stop_reason for r in responses] == ["length"] * 16
    for response in responses:
        assert set(response.output_versions) == {0, 1}
        assert response.output_versions == sorted(response.output_versions)
    assert backend.version == WeightVersion("inc", 1)


def test_a_failed_stream_leaves_the_old_version_serving_unpaused(
    make_backend: Callable[..., EmbeddedBackend], other_weights: Mapping[str, Tensor]
) -> None:
    backend = make_backend()
    future = backend.update_weights(update_meta(1))
    with pytest.raises(WeightSyncError):
        publish(update_meta(1), [ParamSpec("a", (1,), "float32")], [])
    with pytest.raises(WeightSyncError, match="stream"):
        future.result(10)
    wrong = backend.update_weights(update_meta(2))
    send(update_meta(2), {"a": torch.zeros(1)})
    with pytest.raises(WeightSyncError, match="missing"):
        wrong.result(10)
    assert backend.version == WeightVersion("inc", 0)
    response = asyncio.run(backend.generate(request((5,), max_new_tokens=2)))
    assert set(response.output_versions) == {0}


def test_an_update_that_never_comes_times_out_and_can_be_tried_again(
    make_backend: Callable[..., EmbeddedBackend], other_weights: Mapping[str, Tensor]
) -> None:
    backend = make_backend(update_timeout_s=0.05)
    with pytest.raises(WeightSyncError, match=r"no published weights within 0\.05 s"):
        backend.update_weights(update_meta(1)).result(10)
    send(update_meta(1), other_weights)
    assert backend.version.n == 0


def test_closing_ends_requests_and_updates_with_engine_errors(
    make_backend: Callable[..., EmbeddedBackend],
) -> None:
    backend = make_backend()

    async def scenario() -> None:
        task = asyncio.create_task(
            backend.generate(request((5,), max_new_tokens=500, ignore_eos=True))
        )
        await until(lambda: backend.stats()["running"] == 1)
        backend.close()
        with pytest.raises(EngineError, match="closed"):
            await task

    update = backend.update_weights(update_meta(1))
    asyncio.run(scenario())
    with pytest.raises(WeightSyncError, match="closed"):
        update.result(10)
    backend.close()
    with pytest.raises(EngineError, match="closed"):
        backend.start()


def test_cancelling_the_task_aborts_the_request(
    make_backend: Callable[..., EmbeddedBackend],
) -> None:
    backend = make_backend()

    async def scenario() -> None:
        task = asyncio.create_task(
            backend.generate(request((5,), max_new_tokens=500, ignore_eos=True))
        )
        await until(lambda: backend.stats()["running"] == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: backend.stats()["aborted"] == 1)

    asyncio.run(scenario())
    stats = backend.stats()
    assert (stats["running"], stats["finished"]) == (0, 0)
    assert stats["tokens"] < 500


def test_loops_of_several_threads_share_one_backend(
    make_backend: Callable[..., EmbeddedBackend],
) -> None:
    backend = make_backend()
    results: dict[int, list[int]] = {}

    def client(seed: int) -> None:
        item = request((5, 6), seed=seed, max_new_tokens=8)
        results[seed] = asyncio.run(backend.generate(item)).output_tokens

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    alone = [
        asyncio.run(backend.generate(request((5, 6), seed=s, max_new_tokens=8))) for s in range(4)
    ]
    assert [results[seed] for seed in range(4)] == [item.output_tokens for item in alone]


def test_a_broken_core_fails_everyone_with_its_error(
    make_backend: Callable[..., EmbeddedBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend()

    def explode(self: EmbeddedCore) -> None:
        raise ZeroDivisionError("in the middle of a step")

    monkeypatch.setattr(EmbeddedCore, "step", explode)
    with pytest.raises(EngineError, match="ZeroDivisionError: in the middle of a step"):
        asyncio.run(backend.generate(request((5,))))
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        backend.pause_generation()


# --- the waiting itself ---


def test_a_commit_that_hangs_takes_the_backend_out_of_service(
    other_weights: Mapping[str, Tensor],
) -> None:
    committing: Future[None] = Future()
    committing.set_running_or_notify_cancel()
    stuck: list[str] = []
    update = PendingUpdate(
        update_meta(1), lambda _: committing, timeout_s=0.2, on_stuck=stuck.append
    )
    send(update_meta(1), other_weights)
    with pytest.raises(WeightSyncError, match="out of service"):
        update.future.result(10)
    assert len(stuck) == 1


def test_a_commit_that_did_not_begin_in_time_is_called_off(
    other_weights: Mapping[str, Tensor],
) -> None:
    committing: Future[None] = Future()
    stuck: list[str] = []
    update = PendingUpdate(
        update_meta(1), lambda _: committing, timeout_s=0.2, on_stuck=stuck.append
    )
    send(update_meta(1), other_weights)
    with pytest.raises(WeightSyncError, match="old version serves on"):
        update.future.result(10)
    assert committing.cancelled()
    assert stuck == []


def test_an_update_returns_before_the_weights_exist(
    make_backend: Callable[..., EmbeddedBackend], other_weights: Mapping[str, Tensor]
) -> None:
    backend = make_backend()
    begun = time.monotonic()
    future = backend.update_weights(update_meta(1))
    with pytest.raises(FutureTimeoutError):
        future.result(0)
    assert time.monotonic() - begun < 10
    send(update_meta(1), other_weights)
    future.result(10)
    assert backend.version.n == 1


def test_a_version_that_is_awaited_already_is_refused_in_the_future(
    make_backend: Callable[..., EmbeddedBackend], other_weights: Mapping[str, Tensor]
) -> None:
    backend = make_backend()
    first = backend.update_weights(update_meta(1))
    with pytest.raises(WeightSyncError, match="expected already"):
        backend.update_weights(update_meta(1)).result(10)
    send(update_meta(1), other_weights)
    first.result(10)
    assert backend.version.n == 1
