"""The scripted double behaves like an engine, without a model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence

import pytest
import torch

from tandem.errors import ConfigError, DataError, EngineError, WeightSyncError
from tandem.inference.clock import VirtualClock
from tandem.inference.scripted import ScriptedBackend, ScriptedOptions
from tandem.types import LLMRequest, LLMResponse, ParamSpec, WeightUpdateMeta, WeightVersion
from tandem.weights import publish, release

from .conftest import request

CHANNEL = "test-scripted"
SPEC = ParamSpec("w", (2,), "float32")


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    yield
    release(CHANNEL)


def update_meta(version: int) -> WeightUpdateMeta:
    return WeightUpdateMeta("inprocess", version, incarnation="inc", channel=CHANNEL)


def started(script: object = None, **options: object) -> ScriptedBackend:
    backend = ScriptedBackend(script, incarnation="inc", options=ScriptedOptions(**options))
    backend.start()
    return backend


def play(backend: ScriptedBackend, *ids: int, **options: object) -> LLMResponse:
    return asyncio.run(backend.generate(request(ids or (5, 6), **options)))


class Letters:
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + i) for i in token_ids)


def test_a_mapping_gives_the_completion_of_the_prompt() -> None:
    response = play(started({(5, 6): (7, 8, 2)}))
    assert response.output_tokens == [7, 8, 2]
    assert response.output_logprobs == [-1.0] * 3
    assert response.output_versions == [0] * 3
    assert response.stop_reason == "stop"


def test_tokens_are_told_as_they_come() -> None:
    backend = started({(5, 6): (7, 8, 2)}, logprob=lambda version: -0.5)
    told: list[tuple[Sequence[float], ...]] = []
    asked = LLMRequest("r", (5, 6), on_tokens=lambda *new: told.append(new))
    response = asyncio.run(backend.generate(asked))
    assert told == [([7], [-0.5], [0]), ([8], [-0.5], [0]), ([2], [-0.5], [0])]
    assert response.output_tokens == [7, 8, 2]


def test_a_prompt_that_the_mapping_lacks_fails_alone() -> None:
    backend = started({(5, 6): (7,)})
    with pytest.raises(DataError, match="no completion"):
        play(backend, 1)
    assert play(backend).output_tokens == [7]


def test_the_default_script_is_a_function_of_prompt_and_seed() -> None:
    one, other = started(), started()
    same = [play(backend, 5, 6, seed=3).output_tokens for backend in (one, other)]
    assert same[0] == same[1]
    assert same[0][-1] == 2
    assert 2 not in same[0][:-1]
    assert len({tuple(play(one, 5, 6, seed=s).output_tokens) for s in range(8)}) > 6


def test_budgets_and_stop_tokens_end_a_completion() -> None:
    backend = started(lambda ids, seed: range(10, 30), max_context=6)
    assert play(backend, max_new_tokens=3).output_tokens == [10, 11, 12]
    assert play(backend, max_new_tokens=3).stop_reason == "length"
    assert play(backend).output_tokens == [10, 11, 12, 13]
    assert play(backend, max_tokens=3).output_tokens == [10]
    stopped = play(backend, stop_token_ids=(11,))
    assert (stopped.output_tokens, stopped.stop_reason) == ([10, 11], "stop")


def test_stop_strings_need_a_decoder_and_cut_its_text() -> None:
    with pytest.raises(ConfigError, match=r"gconfig\.stop"):
        play(started(), stop=("d",))
    backend = started(lambda ids, seed: range(9), decoder=Letters(), eos_id=99)
    response = play(backend, stop=("de",))
    assert (response.text, response.stop_reason) == ("abc", "stop")
    assert response.output_tokens == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "options",
    [{"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}, {"logit_bias": {1: 2.0}}, {"n_samples": 2}],
)
def test_options_that_a_script_cannot_follow_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        play(started(), **options)


def test_a_double_without_seeds_refuses_a_seed() -> None:
    backend = started(refuse=frozenset({"seed"}))
    with pytest.raises(ConfigError, match=r"gconfig\.seed: got 1"):
        play(backend, seed=1)
    assert play(backend).output_tokens


@pytest.mark.parametrize(("ids", "words"), [((), "empty"), ((5,) * 6, "context")])
def test_empty_and_overlong_prompts_are_refused(ids: tuple[int, ...], words: str) -> None:
    backend = started(max_context=6)
    with pytest.raises(DataError, match=words):
        asyncio.run(backend.generate(request(ids)))


def test_versions_change_in_the_middle_of_a_completion() -> None:
    """A request at version 3 that is updated to version 4 after two of five tokens."""
    backend = started({(5, 6): (7, 8, 9, 10, 11)}, logprob=lambda version: -float(version))
    update(backend, 3)
    backend.hold(2)
    results: list[LLMResponse] = []
    thread = threading.Thread(target=lambda: results.append(play(backend)))
    thread.start()
    backend.wait_held(1)
    assert backend.stats()["tokens"] == 2
    update(backend, 4)
    backend.release()
    thread.join(10)
    assert results[0].output_versions == [3, 3, 4, 4, 4]
    assert results[0].output_logprobs == [-3.0, -3.0, -4.0, -4.0, -4.0]


def update(backend: ScriptedBackend, version: int, name: str = "w") -> None:
    future = backend.update_weights(update_meta(version))
    publish(update_meta(version), [ParamSpec(name, (2,), "float32")], [(name, torch.ones(2))])
    future.result(10)


def test_a_wrong_manifest_is_refused_when_the_model_is_declared() -> None:
    backend = started(param_specs=[SPEC])
    with pytest.raises(WeightSyncError, match="unexpected: v"):
        update(backend, 1, name="v")
    assert backend.version == WeightVersion("inc", 0)
    update(backend, 2)
    assert backend.version == WeightVersion("inc", 2)


def test_sixteen_paused_requests_survive_an_update() -> None:
    backend = started(lambda ids, seed: (7, 8, 9, 2))
    backend.hold(2)

    async def scenario() -> list[LLMResponse]:
        tasks = [asyncio.create_task(backend.generate(request((i,)))) for i in range(16)]
        await asyncio.to_thread(backend.wait_held, 16)
        backend.pause_generation()
        update(backend, 1)
        backend.release()
        await asyncio.to_thread(backend.wait_held, 16)
        assert backend.stats()["tokens"] == 32
        backend.resume_generation()
        return await asyncio.gather(*tasks)

    for response in asyncio.run(scenario()):
        assert response.output_versions == [0, 0, 1, 1]


def test_latency_passes_on_the_injected_clock() -> None:
    clock = VirtualClock()
    backend = started({(5, 6): (7, 8, 2)}, clock=clock, latency_s=2.0)
    results: list[LLMResponse] = []
    thread = threading.Thread(target=lambda: results.append(play(backend)))
    thread.start()
    for _ in range(3):
        assert clock.wait_sleepers(1, timeout_s=10)
        clock.advance(2.0)
    thread.join(10)
    assert (results[0].ttft, results[0].itl, results[0].latency) == (2.0, [2.0, 2.0], 6.0)


def test_closing_ends_held_requests_and_pending_updates() -> None:
    backend = started()
    backend.pause_generation()
    pending = backend.update_weights(update_meta(1))

    async def scenario() -> None:
        task = asyncio.create_task(backend.generate(request((5,))))
        await asyncio.to_thread(backend.wait_held, 1)
        backend.close()
        with pytest.raises(EngineError, match="closed"):
            await task

    asyncio.run(scenario())
    with pytest.raises(WeightSyncError, match="closed"):
        pending.result(10)
    with pytest.raises(EngineError, match="closed"):
        play(backend)


def test_cancelling_a_held_request_frees_it() -> None:
    backend = started()
    backend.pause_generation()

    async def scenario() -> None:
        task = asyncio.create_task(backend.generate(request((5,))))
        await asyncio.to_thread(backend.wait_held, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert backend.stats()["running"] == 0


def test_a_backend_that_was_not_started_says_so() -> None:
    with pytest.raises(EngineError, match="start"):
        asyncio.run(ScriptedBackend().generate(request((5,))))


@pytest.mark.parametrize("extra", [{"raw_logprobs": True}, {"top_logprobs": 1}])
def test_probabilities_that_a_script_does_not_have_are_refused(extra: dict[str, object]) -> None:
    backend = ScriptedBackend()
    backend.start()
    with pytest.raises(ConfigError, match=next(iter(extra))):
        asyncio.run(backend.generate(LLMRequest("r", (1,), **extra)))
    backend.close()
