"""What one request may ask for beyond tokens, and what is refused, alone."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.config import InferenceConfig
from tandem.errors import ConfigError, DataError
from tandem.inference.embedded import EmbeddedBackend
from tandem.inference.embedded.frames import (
    decode_request,
    decode_response,
    encode_request,
    encode_response,
)
from tandem.types import GenerationConfig, LLMRequest, LLMResponse
from tandem.weights import release

from .conftest import MakeCore, Scorer, commit, drain, request, run
from .test_updates import CHANNEL, published

PROMPT = tuple(4 + i * 7 % 40 for i in range(60))


def asking(**changes: object) -> LLMRequest:
    options = GenerationConfig(seed=3, max_new_tokens=8, temperature=0.7, ignore_eos=True)
    return LLMRequest("r", PROMPT, options, **changes)


def test_prompt_logprobs_are_those_of_a_plain_forward_pass(
    make_core: MakeCore, score: Scorer
) -> None:
    for budget in (2048, 17):
        (response,) = run(make_core(max_tokens_per_pass=budget), [asking(prompt_logprobs=True)])
        assert response.prompt_logprobs[0] == 0.0
        expected = score(PROMPT[:1], PROMPT[1:], 1.0)
        assert response.prompt_logprobs[1:] == pytest.approx(expected, abs=1e-4)


def test_prompt_logprobs_are_complete_although_the_prompt_is_known(
    make_core: MakeCore, score: Scorer
) -> None:
    core = make_core()
    first, second = run(core, [asking(), asking(prompt_logprobs=True)])
    (third,) = run(core, [asking(prompt_logprobs=True)])
    expected = score(PROMPT[:1], PROMPT[1:], 1.0)
    for response in (second, third):
        assert response.prompt_logprobs[1:] == pytest.approx(expected, abs=1e-4)
        assert response.output_tokens == first.output_tokens
    core.check()


def test_an_update_in_the_middle_of_a_prompt_starts_its_logprobs_again(
    make_core: MakeCore, other_weights: Mapping[str, Tensor], other_model_dir: Path
) -> None:
    core = make_core(max_tokens_per_pass=20)
    core.add(0, asking(prompt_logprobs=True))
    core.step()
    commit(core, published(1, other_weights))
    release(CHANNEL)
    (response,) = drain(core, 1)
    (expected,) = run(make_core(other_model_dir), [asking(prompt_logprobs=True)])
    assert response.prompt_logprobs == pytest.approx(expected.prompt_logprobs, abs=1e-5)


def test_a_prompt_of_one_token_has_nothing_to_score(make_core: MakeCore) -> None:
    item = LLMRequest("r", (5,), GenerationConfig(max_new_tokens=2), prompt_logprobs=True)
    (response,) = run(make_core(), [item])
    assert response.prompt_logprobs == [0.0]


def test_raw_logprobs_are_at_temperature_one(make_core: MakeCore, score: Scorer) -> None:
    plain, raw = run(make_core(), [asking(), asking(raw_logprobs=True)])
    assert plain.raw_logprobs is None
    assert raw.output_tokens == plain.output_tokens
    assert raw.raw_logprobs == pytest.approx(score(PROMPT, raw.output_tokens, 1.0), abs=1e-4)
    assert raw.output_logprobs == pytest.approx(score(PROMPT, raw.output_tokens, 0.7), abs=1e-4)


def test_alternatives_are_the_likeliest_tokens_of_the_distribution_sampled_from(
    make_core: MakeCore, reference: PreTrainedModel
) -> None:
    (response,) = run(make_core(), [asking(top_logprobs=3)])
    ids = torch.tensor([[*PROMPT, *response.output_tokens]])
    with torch.no_grad():
        rows = (reference(ids).logits[0, len(PROMPT) - 1 : -1] / 0.7).log_softmax(-1)
    values, tokens = rows.topk(3)
    assert len(response.top_logprobs) == len(response.output_tokens)
    for found, logprobs, expected in zip(response.top_logprobs, values, tokens, strict=True):
        assert [token for token, _ in found] == expected.tolist()
        assert [p for _, p in found] == pytest.approx(logprobs.tolist(), abs=1e-4)


def test_extras_survive_preemption_and_removal_of_neighbours(make_core: MakeCore) -> None:
    def ask(seed: int) -> LLMRequest:
        options = GenerationConfig(seed=seed, max_new_tokens=50, ignore_eos=True)
        return LLMRequest("r", PROMPT[seed : seed + 9], options, raw_logprobs=True, top_logprobs=2)

    given = [ask(seed) for seed in range(4)]
    expected = run(make_core(), given)
    core = make_core(cache_tokens=160)
    for ticket, item in enumerate(given):
        core.add(ticket, item)
    responses = drain(core, 4)
    assert core.counters.preempted > 0
    for response, alone in zip(responses, expected, strict=True):
        assert response.output_tokens == alone.output_tokens
        assert response.raw_logprobs == pytest.approx(alone.raw_logprobs, abs=1e-5)
        assert response.raw_logprobs == pytest.approx(response.output_logprobs, abs=1e-5)
        for token, logprob, best in zip(
            response.output_tokens, response.output_logprobs, response.top_logprobs, strict=True
        ):
            assert len(best) == 2
            assert dict(best).get(token, logprob) == pytest.approx(logprob, abs=1e-6)


def test_requests_and_responses_with_extras_cross_to_the_child_and_back() -> None:
    item = asking(raw_logprobs=True, top_logprobs=2, prompt_logprobs=True)
    assert decode_request(encode_request(item)) == item
    response = LLMResponse(
        input_tokens=list(PROMPT),
        output_tokens=[5],
        output_logprobs=[-1.0],
        output_versions=[0],
        stop_reason="length",
        raw_logprobs=[-1.5],
        top_logprobs=[[(5, -1.0), (6, -2.0)]],
        prompt_logprobs=[0.0] * len(PROMPT),
    )
    frame = encode_response(response)
    frame["top_logprobs"] = [[list(pair) for pair in token] for token in frame["top_logprobs"]]
    assert decode_response(frame, item) == response


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_p": math.nan},
        {"top_p": 0.0},
        {"min_p": math.nan},
        {"top_k": -1},
        {"repetition_penalty": math.nan},
        {"presence_penalty": math.inf},
        {"max_new_tokens": 0},
        {"max_new_tokens": -3},
        {"logit_bias": {5: math.nan}},
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        GenerationConfig(**options)


@pytest.mark.parametrize("count", [-1, 65, 1.5])
def test_a_wrong_number_of_alternatives_is_refused(count: object) -> None:
    with pytest.raises(ConfigError, match="top_logprobs"):
        asking(top_logprobs=count)


def test_a_bad_request_fails_alone(model_dir: Path) -> None:
    backend = EmbeddedBackend(InferenceConfig(max_context=32), str(model_dir), "inc")
    backend.start()

    async def outcomes() -> list[LLMResponse | BaseException]:
        return await asyncio.gather(
            backend.generate(request(())),
            backend.generate(request([5] * 31, max_new_tokens=9, ignore_eos=True)),
            backend.generate(request([5] * 32)),
            backend.generate(request([5] * 33)),
            backend.generate(request((5,), stop_token_ids=(9999,))),
            backend.generate(request((5, 6), max_new_tokens=4, ignore_eos=True)),
            return_exceptions=True,
        )

    empty, below, at, over, unknown, good = asyncio.run(outcomes())
    backend.close()
    assert [type(item) for item in (empty, at, over, unknown)] == [DataError] * 4
    assert len(below.output_tokens) == 1
    assert len(good.output_tokens) == 4


def test_scoring_a_completion_equals_generating_it(make_core: MakeCore) -> None:
    """The two uses of the engine agree on the log-probability of a token."""
    core = make_core()
    item = request(PROMPT, seed=1, max_new_tokens=12, ignore_eos=True)
    (made,) = run(core, [item])
    whole = LLMRequest(
        "s",
        (*PROMPT, *made.output_tokens),
        GenerationConfig(max_new_tokens=1),
        prompt_logprobs=True,
    )
    (scored,) = run(core, [whole])
    assert scored.prompt_logprobs[len(PROMPT) :] == pytest.approx(made.output_logprobs, abs=1e-5)
