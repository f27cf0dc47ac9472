"""The child process: same numbers as in-process, typed errors, weights by file, death."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem.config import InferenceConfig
from tandem.errors import ConfigError, DataError, EngineError, WeightSyncError
from tandem.inference.embedded import ChildBackend, EmbeddedBackend
from tandem.inference.embedded.frames import decode_request, encode_request, write_frame
from tandem.inference.embedded.link import child_environment
from tandem.types import GenerationConfig, LLMRequest, LLMResponse, WeightUpdateMeta, WeightVersion
from tandem.weights import release

from .conftest import request
from .test_updates import send

CHANNEL = "test-process"
GIVEN = [
    request(range(4, 6 + i % 9), str(i), seed=i, max_new_tokens=12, temperature=0.9)
    for i in range(20)
]


def update_meta(version: int) -> WeightUpdateMeta:
    return WeightUpdateMeta("shared_memory", version, incarnation="inc", channel=CHANNEL)


@pytest.fixture(scope="module")
def child(model_dir: Path) -> Iterator[ChildBackend]:
    backend = ChildBackend(InferenceConfig(threads=1), str(model_dir), "inc")
    backend.start()
    yield backend
    backend.close()
    release(CHANNEL)


def generate_all(backend: ChildBackend | EmbeddedBackend) -> list[LLMResponse]:
    async def scenario() -> list[LLMResponse]:
        return await asyncio.gather(*[backend.generate(item) for item in GIVEN])

    return asyncio.run(scenario())


def test_the_child_gives_the_tokens_and_logprobs_of_the_thread(
    child: ChildBackend, model_dir: Path
) -> None:
    inprocess = EmbeddedBackend(InferenceConfig(), str(model_dir), "inc")
    inprocess.start()
    for one, other in zip(generate_all(child), generate_all(inprocess), strict=True):
        assert one.input_tokens == other.input_tokens
        assert one.output_tokens == other.output_tokens
        assert one.output_logprobs == pytest.approx(other.output_logprobs, abs=1e-6)
        assert (one.text, one.stop_reason) == (other.text, other.stop_reason)
        assert len(one.itl) == len(one.output_tokens) - 1
    inprocess.close()


@pytest.mark.parametrize("is_child", [True, False])
def test_tokens_are_told_as_they_come_and_are_those_of_the_response(
    child: ChildBackend, model_dir: Path, is_child: bool
) -> None:
    backend: ChildBackend | EmbeddedBackend = child
    if not is_child:
        backend = EmbeddedBackend(InferenceConfig(max_batch_size=2), str(model_dir), "inc")
        backend.start()
    told: list[list[tuple[int, float, int]]] = [[] for _ in range(4)]

    async def scenario() -> list[LLMResponse]:
        asked = [
            replace(item, on_tokens=lambda *new, mine=mine: mine.extend(zip(*new, strict=True)))
            for item, mine in zip(GIVEN, told, strict=False)
        ]
        # Those that do not listen share the batch with those that do.
        return await asyncio.gather(*[backend.generate(item) for item in (*asked, *GIVEN[4:8])])

    found = asyncio.run(scenario())
    for response, mine in zip(found[:4], told, strict=True):
        made = (response.output_tokens, response.output_logprobs, response.output_versions)
        assert mine == list(zip(*made, strict=True))
    if not is_child:
        backend.close()


def test_stats_speak_of_the_child(child: ChildBackend) -> None:
    stats = child.stats()
    assert stats["pid"] not in (None, os.getpid())
    assert stats["threads"] == 1
    assert stats["rss_bytes"] > 50_000_000


@pytest.mark.parametrize(
    ("item", "error", "words"),
    [
        (request(()), DataError, "empty"),
        (request([5] * 4000), DataError, "4000 tokens"),
        (request((5,), n_samples=3), ConfigError, "n_samples"),
        (request((5, torch.tensor(3))), DataError, "plain integers"),
    ],
)
def test_a_wrong_request_fails_alone_with_its_typed_error(
    child: ChildBackend, item: LLMRequest, error: type, words: str
) -> None:
    async def scenario() -> None:
        good = asyncio.create_task(child.generate(request((5,), max_new_tokens=3)))
        with pytest.raises(error, match=words):
            await child.generate(item)
        assert len((await good).output_tokens) >= 1

    asyncio.run(scenario())


def test_cancelling_the_task_aborts_the_request_in_the_child(child: ChildBackend) -> None:
    async def scenario() -> None:
        before = child.stats()["aborted"]
        task = asyncio.create_task(
            child.generate(request((5,), max_new_tokens=500, ignore_eos=True))
        )
        async with asyncio.timeout(20):
            while child.stats()["running"] == 0:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while child.stats()["running"] != 0:
                await asyncio.sleep(0)
        assert child.stats()["aborted"] == before + 1

    asyncio.run(scenario())


def test_weights_reach_the_child_through_a_file_that_it_verifies(
    child: ChildBackend, other_weights: Mapping[str, Tensor], other_model_dir: Path
) -> None:
    """One test in order, because the child is shared: a damaged file, wrong names, then a good
    update in the middle of a paused request."""
    damaged = child.update_weights(update_meta(1))
    meeting = _intercept(update_meta(1), other_weights)
    with pytest.raises(WeightSyncError, match="sha256"):
        damaged.result(20)
    assert meeting
    wrong = child.update_weights(update_meta(2))
    send(update_meta(2), {**other_weights, "extra": torch.zeros(2)})
    with pytest.raises(WeightSyncError, match="unexpected: extra"):
        wrong.result(20)
    assert child.version == WeightVersion("inc", 0)

    child.pause_generation()
    future = child.update_weights(update_meta(3))
    send(update_meta(3), other_weights)
    future.result(20)
    assert child.version == WeightVersion("inc", 3)
    child.resume_generation()
    responses = generate_all(child)
    assert {v for item in responses for v in item.output_versions} == {3}
    fresh = EmbeddedBackend(InferenceConfig(), str(other_model_dir), "inc")
    fresh.start()
    expected = generate_all(fresh)
    fresh.close()
    assert [r.output_tokens for r in responses] == [r.output_tokens for r in expected]


def test_requests_run_through_an_update_of_the_child(
    child: ChildBackend, other_weights: Mapping[str, Tensor]
) -> None:
    old = child.version.n
    meta = update_meta(old + 1)

    async def scenario() -> list[LLMResponse]:
        tasks = [
            asyncio.create_task(
                child.generate(request((5, 6 + i), seed=i, max_new_tokens=400, ignore_eos=True))
            )
            for i in range(4)
        ]
        before = child.stats()["tokens"]
        async with asyncio.timeout(20):
            while child.stats()["tokens"] < before + 8:
                await asyncio.sleep(0)
        update = child.update_weights(meta)
        send(meta, other_weights)
        await asyncio.wrap_future(update)
        return await asyncio.gather(*tasks)

    for response in asyncio.run(scenario()):
        assert response.output_versions == sorted(response.output_versions)
        assert set(response.output_versions) == {old, old + 1}
        assert len(response.output_tokens) == 400
    stats = child.stats()
    assert stats["weight_bytes"] == 0
    assert stats["published_weight_bytes"] == sum(item.nbytes for item in other_weights.values())


def _intercept(meta: WeightUpdateMeta, weights: Mapping[str, Tensor]) -> bool:
    """Publish ``weights`` with one byte changed between the digest and the hand-over."""
    from tandem.weights import channel

    real = channel._hand_over

    def damage(where: object, key: object, outcome: object) -> None:
        location, entry = outcome.location, outcome.manifest.tensors[0]
        with open(location["path"], "r+b") as file:
            file.seek(location["data_start"] + entry.offset)
            byte = file.read(1)
            file.seek(location["data_start"] + entry.offset)
            file.write(bytes([byte[0] ^ 1]))
        real(where, key, outcome)

    channel._hand_over = damage
    try:
        send(meta, weights)
    finally:
        channel._hand_over = real
    return True


def test_an_inprocess_transport_cannot_reach_a_child(
    child: ChildBackend, other_weights: Mapping[str, Tensor]
) -> None:
    meta = WeightUpdateMeta("inprocess", 9, incarnation="inc", channel=CHANNEL)
    future = child.update_weights(meta)
    send(meta, other_weights)
    with pytest.raises(WeightSyncError, match="cannot cross processes"):
        future.result(20)


def test_the_death_of_the_child_fails_everyone_who_waits(model_dir: Path) -> None:
    backend = ChildBackend(InferenceConfig(), str(model_dir), "inc")
    backend.start()
    backend.pause_generation()

    async def scenario() -> None:
        tasks = [asyncio.create_task(backend.generate(request((5,)))) for _ in range(3)]
        await asyncio.sleep(0)
        update = backend.update_weights(update_meta(1))
        os.kill(backend.stats()["pid"], signal.SIGKILL)
        for task in tasks:
            with pytest.raises(EngineError, match="exit code -9"):
                await task
        with pytest.raises(WeightSyncError, match="exit code -9"):
            update.result(20)
        with pytest.raises(EngineError, match="exit code -9"):
            await backend.generate(request((5,)))

    asyncio.run(scenario())
    backend.close()


def test_a_child_that_hangs_does_not_block_a_pause_for_ever(model_dir: Path) -> None:
    backend = ChildBackend(InferenceConfig(update_timeout_s=0.2), str(model_dir), "inc")
    backend.start()
    pid = backend.stats()["pid"]
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EngineError, match="no token border within"):
        backend.pause_generation()
    os.kill(pid, signal.SIGCONT)
    backend.close()


def test_an_answer_that_cannot_be_read_fails_everyone_who_waits(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = ChildBackend(InferenceConfig(), str(model_dir), "inc")
    backend.start()

    def spoilt(*_: object) -> None:
        raise KeyError("output_tokens")

    monkeypatch.setattr("tandem.inference.embedded.link.decode_response", spoilt)
    with pytest.raises(EngineError, match="cannot be used: KeyError"):
        asyncio.run(asyncio.wait_for(backend.generate(request((5,))), 20))
    backend.close()


def test_a_model_that_cannot_be_loaded_is_refused_with_its_own_error(tmp_path: Path) -> None:
    backend = ChildBackend(InferenceConfig(), str(tmp_path / "nowhere"), "inc")
    with pytest.raises(ConfigError, match="nowhere"):
        backend.start()
    backend.close()


def test_a_child_that_does_not_get_ready_in_time_is_ended(model_dir: Path) -> None:
    backend = ChildBackend(InferenceConfig(start_timeout_s=0.01), str(model_dir), "inc")
    with pytest.raises(EngineError, match="start_timeout_s"):
        backend.start()
    backend.close()


def test_the_child_ends_when_its_parent_is_killed(model_dir: Path, tmp_path: Path) -> None:
    """The parent here is a bare one, which imports nothing heavy."""
    first = {"config": {}, "model_path": str(model_dir), "incarnation": "inc"}
    with (tmp_path / "frame").open("wb") as file:
        write_frame(file, first)
    program = textwrap.dedent(
        """
        import subprocess, sys
        command = [sys.executable, "-m", "tandem.inference.embedded.child"]
        pipe = subprocess.PIPE
        child = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        child.stdin.write(open(sys.argv[1], "rb").read())
        child.stdin.flush()
        child.stdout.read(8)
        print(child.pid, flush=True)
        sys.stdin.read()
        """
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "frame")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environment(1),
    )
    watch = os.pidfd_open(int(parent.stdout.readline()))
    assert not select.select([watch], [], [], 0)[0]
    parent.kill()
    parent.communicate()
    ended, _, _ = select.select([watch], [], [], 20)
    os.close(watch)
    assert ended


def test_a_request_survives_the_way_to_the_child() -> None:
    item = LLMRequest(
        "rid",
        (1, 2, 3),
        GenerationConfig(
            max_new_tokens=7,
            temperature=0.1 + 0.2,
            logit_bias={5: -1.5},
            stop=("a", "é"),
            stop_token_ids=(4,),
            seed=2**63 + 5,
        ),
    )
    assert decode_request(json.loads(json.dumps(encode_request(item)))) == item


def test_the_child_is_told_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """And how long they look for work, which this process's own wait policy would override."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    environment = child_environment(3)
    assert environment["OMP_NUM_THREADS"] == "3"
    assert "OMP_WAIT_POLICY" not in environment
    assert int(environment["GOMP_SPINCOUNT"]) < 10**6


def test_how_long_threads_look_for_work_is_left_to_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert child_environment(1)["GOMP_SPINCOUNT"] == "7"
