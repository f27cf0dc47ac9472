"""The stepper: tokens, log-probabilities, batching, budgets, aborts, pauses."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen3Config,
)

from tandem.errors import CapabilityError, ConfigError, DataError, EngineError
from tandem.inference.embedded.build import PROBE_TOLERANCE, probe
from tandem.inference.embedded.core import CoreOptions, EmbeddedCore
from tandem.inference.embedded.requests import ModelLimits
from tandem.models.attention import ATTENTION
from tandem.models.cache.decoded import DecodedRows
from tandem.types import WeightVersion

from .conftest import MakeCore, Scorer, drain, request, run, score_with

EOS = 2


def prompts(count: int, *, low: int = 1, high: int = 40) -> list[tuple[int, ...]]:
    draw = random.Random(5)
    return [
        tuple(draw.randrange(4, 50) for _ in range(draw.randint(low, high))) for _ in range(count)
    ]


def assert_logprobs_agree(actual: list[float], expected: list[float]) -> None:
    gaps = sorted(abs(a - e) for a, e in zip(actual, expected, strict=True))
    assert gaps[-1] <= 1e-4
    assert gaps[int(0.999 * (len(gaps) - 1))] <= 1e-5


def test_greedy_tokens_equal_an_argmax_loop_with_full_recompute(
    core: EmbeddedCore, reference: PreTrainedModel
) -> None:
    given = prompts(7)
    responses = run(core, [request(p, greedy=True, max_new_tokens=12) for p in given])
    for prompt, response in zip(given, responses, strict=True):
        ids = list(prompt)
        while len(ids) < len(prompt) + 12 and (len(ids) == len(prompt) or ids[-1] != EOS):
            with torch.no_grad():
                ids.append(int(reference(torch.tensor([ids])).logits[0, -1].argmax()))
        assert response.output_tokens == ids[len(prompt) :]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_a_plain_forward_pass_at_the_temperature(
    core: EmbeddedCore, score: Scorer, temperature: float
) -> None:
    given = prompts(40)
    options = {"max_new_tokens": 30, "temperature": temperature, "ignore_eos": True}
    responses = run(core, [request(p, seed=i, **options) for i, p in enumerate(given)])
    actual, expected = [], []
    for prompt, response in zip(given, responses, strict=True):
        actual += response.output_logprobs
        expected += score(prompt, response.output_tokens, temperature)
    assert len(actual) == 40 * 30
    assert_logprobs_agree(actual, expected)


def test_samples_and_logprobs_do_not_depend_on_the_batch(make_core: MakeCore) -> None:
    given = [request(p, str(i), seed=i, max_new_tokens=20) for i, p in enumerate(prompts(24))]
    together = run(make_core(max_batch_size=24), given)
    in_turns = run(make_core(max_batch_size=5), given)
    alone = [run(make_core(max_batch_size=1), [item])[0] for item in given[:6]]
    for first, second in zip(together + together[:6], in_turns + alone, strict=True):
        assert first.output_tokens == second.output_tokens
        assert first.output_logprobs == pytest.approx(second.output_logprobs, abs=1e-5)


def test_rows_that_move_when_others_leave_keep_their_context(
    make_core: MakeCore, score: Scorer
) -> None:
    given = [
        request(p, seed=i, max_new_tokens=3 + 5 * (i % 4), ignore_eos=True)
        for i, p in enumerate(prompts(20, low=10))
    ]
    for item, response in zip(given, run(make_core(max_batch_size=7), given), strict=True):
        assert_logprobs_agree(
            response.output_logprobs, score(item.input_ids, response.output_tokens, 1.0)
        )


def test_four_seeds_of_one_prompt_give_four_samples_that_any_split_reproduces(
    make_core: MakeCore,
) -> None:
    given = [request((5, 6, 7), seed=7 * 4 + i, max_new_tokens=8) for i in range(4)]
    first = [r.output_tokens for r in run(make_core(), given)]
    again = [r.output_tokens for r in run(make_core(), given)]
    halves = [r.output_tokens for half in (given[:2], given[2:]) for r in run(make_core(), half)]
    assert len({tuple(tokens) for tokens in first}) == 4
    assert first == again == halves


def test_requests_without_a_seed_differ(core: EmbeddedCore) -> None:
    responses = run(core, [request((5, 6, 7), max_new_tokens=12) for _ in range(6)])
    assert len({tuple(r.output_tokens) for r in responses}) > 1


def test_equal_prompts_of_a_step_are_prefilled_once(core: EmbeddedCore, score: Scorer) -> None:
    given = [request(range(4, 24), seed=i, max_new_tokens=5, ignore_eos=True) for i in range(8)]
    responses = run(core, given)
    assert core.counters.prefill_tokens == 20
    for item in responses:
        assert_logprobs_agree(item.output_logprobs, score(range(4, 24), item.output_tokens, 1.0))


def test_requests_join_in_order_between_two_steps(make_core: MakeCore) -> None:
    core = make_core(max_batch_size=2)
    for ticket, length in enumerate((1, 3, 2)):
        core.add(ticket, request((5,), max_new_tokens=length, ignore_eos=True, seed=0))
    core.step()
    assert (core.num_running, core.num_waiting) == (1, 1)
    ended = [[item.ticket for item in core.step()] for _ in range(2)]
    assert [sorted(tickets) for tickets in ended] == [[], [1, 2]]


def test_a_request_that_joins_late_gets_the_same_tokens(
    make_core: MakeCore,
) -> None:
    late = request((9, 8, 7), seed=3, max_new_tokens=10, ignore_eos=True)
    alone = run(make_core(), [late])[0]
    core = make_core()
    for ticket, prompt in enumerate(prompts(5)):
        core.add(ticket, request(prompt, seed=ticket, max_new_tokens=4 + 9 * ticket))
    for _ in range(4):
        core.step()
    core.add(5, late)
    outcomes = {}
    while core.has_work:
        outcomes.update({item.ticket: item.outcome for item in core.step()})
    assert outcomes[5].output_tokens == alone.output_tokens


def test_long_prompts_are_cut_into_several_passes(make_core: MakeCore, score: Scorer) -> None:
    core = make_core(max_tokens_per_pass=64)
    given = [request(p, seed=i, max_new_tokens=4) for i, p in enumerate(prompts(12, high=90))]
    for item, response in zip(given, run(core, given), strict=True):
        expected = score(item.input_ids, response.output_tokens, 1.0)
        assert response.output_logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_new_tokens": 7}, 7),
        ({"max_new_tokens": 50, "max_tokens": 14}, 4),
        ({"max_new_tokens": 1000}, 32 - 10),
    ],
)
def test_the_smallest_budget_ends_generation_with_length(
    make_core: MakeCore, options: dict[str, int], expected: int
) -> None:
    core = make_core(max_context=32)
    (response,) = run(core, [request(range(4, 14), ignore_eos=True, seed=0, **options)])
    assert (len(response.output_tokens), response.stop_reason) == (expected, "length")


def test_a_sampled_stop_token_ends_the_completion_and_stays_in_it(core: EmbeddedCore) -> None:
    free = request((5, 6, 7), seed=1, max_new_tokens=20, ignore_eos=True)
    (unstopped,) = run(core, [free])
    stop = unstopped.output_tokens[4]
    cut = unstopped.output_tokens.index(stop) + 1
    item = request((5, 6, 7), seed=1, max_new_tokens=20, ignore_eos=True, stop_token_ids=(stop,))
    (response,) = run(core, [item])
    assert response.output_tokens == unstopped.output_tokens[:cut]
    assert response.output_logprobs == unstopped.output_logprobs[:cut]
    assert response.output_versions == [0] * cut
    assert response.stop_reason == "stop"
    assert response.text == core.limits.decoder.decode(unstopped.output_tokens[: cut - 1])


def test_eos_stops_unless_ignored(core: EmbeddedCore) -> None:
    bias = {EOS: 100.0}
    stopped, ignored = run(
        core,
        [
            request((5,), logit_bias=bias, max_new_tokens=4),
            request((5,), logit_bias=bias, max_new_tokens=4, ignore_eos=True),
        ],
    )
    assert (stopped.output_tokens, stopped.stop_reason, stopped.text) == ([EOS], "stop", "")
    assert (ignored.output_tokens, ignored.stop_reason) == ([EOS] * 4, "length")


def test_min_new_tokens_forbids_stopping_before_it(core: EmbeddedCore) -> None:
    item = request((5,), logit_bias={EOS: 100.0}, min_new_tokens=3, max_new_tokens=9, seed=0)
    (response,) = run(core, [item])
    assert len(response.output_tokens) == 4
    assert EOS not in response.output_tokens[:3]
    assert response.output_tokens[3] == EOS


def test_a_stop_string_across_tokens_cuts_text_and_keeps_ids(core: EmbeddedCore) -> None:
    free = request((5, 6, 7), seed=2, max_new_tokens=12, ignore_eos=True)
    (unstopped,) = run(core, [free])
    assert unstopped.text is not None
    stop = unstopped.text[3:6]
    at = unstopped.text.index(stop)
    item = request((5, 6, 7), seed=2, max_new_tokens=12, ignore_eos=True, stop=("@@", stop))
    (response,) = run(core, [item])
    assert (response.text, response.stop_reason) == (unstopped.text[:at], "stop")
    assert response.output_tokens == unstopped.output_tokens[: at + 3]
    assert len(response.output_logprobs) == len(response.output_versions) == at + 3


def test_abort_returns_what_was_made_and_leaves_the_others_alone(make_core: MakeCore) -> None:
    given = [
        request(p, seed=i, max_new_tokens=9, ignore_eos=True) for i, p in enumerate(prompts(3))
    ]
    expected = run(make_core(), given)
    core = make_core()
    for ticket, item in enumerate(given):
        core.add(ticket, item)
    core.add(3, request((5,)))
    for _ in range(4):
        core.step()
    (aborted,) = core.abort({0})
    assert aborted.outcome.output_tokens == expected[0].output_tokens[:4]
    assert aborted.outcome.stop_reason == "abort"
    others = {}
    while core.has_work:
        others.update({item.ticket: item.outcome for item in core.step()})
    for ticket in (1, 2):
        assert others[ticket].output_tokens == expected[ticket].output_tokens


def test_an_aborted_request_that_never_ran_has_no_tokens(make_core: MakeCore) -> None:
    core = make_core()
    core.add(0, request((5, 6)))
    (aborted,) = core.abort({0, 17})
    assert (aborted.outcome.output_tokens, aborted.outcome.stop_reason) == ([], "abort")
    assert not core.has_work


def test_pause_keeps_running_requests(make_core: MakeCore) -> None:
    item = request((5, 6), seed=4, max_new_tokens=8, ignore_eos=True)
    (expected,) = run(make_core(), [item])
    core = make_core()
    core.add(0, item)
    for _ in range(3):
        core.step()
    core.pause()
    assert core.step() == []
    assert core.counters.steps == 3
    assert core.num_running == 1
    core.resume()
    assert drain(core, 1)[0].output_tokens == expected.output_tokens


@pytest.mark.parametrize(
    ("ids", "options", "error", "words"),
    [
        ((), {}, DataError, "empty"),
        (range(4, 36), {}, DataError, "prompt of 32 tokens .* context of 32 tokens"),
        ((5, 6), {"max_tokens": 2}, DataError, "max_tokens=2"),
        ((5, 99), {}, DataError, "got token 99"),
        ((5, -1), {}, DataError, "got token -1"),
        ((5, 1.5), {}, DataError, "got token 1.5"),
        ((5,), {"stop_token_ids": (4000,)}, DataError, "stop_token_ids"),
        ((5,), {"logit_bias": {4000: 1.0}}, DataError, "logit_bias"),
        ((5,), {"n_samples": 2}, ConfigError, "n_samples"),
    ],
)
def test_a_wrong_request_is_refused_with_a_typed_error(
    make_core: MakeCore, ids: tuple, options: dict, error: type, words: str
) -> None:
    core = make_core(max_context=32)
    with pytest.raises(error, match=words):
        core.add(0, request(ids, **options))
    assert not core.has_work


def test_a_prompt_that_leaves_room_for_one_token_is_served(make_core: MakeCore) -> None:
    (response,) = run(make_core(max_context=32), [request([5] * 31, seed=0)])
    assert len(response.output_tokens) == 1


def test_stop_strings_without_a_tokenizer_are_refused(core: EmbeddedCore) -> None:
    limits = ModelLimits(core.limits.vocab_size, 64, (EOS,), None)
    bare = EmbeddedCore(core.model, limits, WeightVersion("inc", 0), CoreOptions(4))
    with pytest.raises(ConfigError, match="no tokenizer"):
        bare.add(0, request((5,), stop=("x",)))
    assert run(bare, [request((5,), max_new_tokens=2)])[0].text is None


def test_non_finite_logits_fail_the_request_and_do_not_linger(make_core: MakeCore) -> None:
    core = make_core()
    weight = core.weights.parameters["model.norm.weight"]
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    core.add(0, request((5, 6), max_new_tokens=3))
    (broken,) = core.step()
    assert isinstance(broken.outcome, EngineError)
    with torch.no_grad():
        weight.copy_(kept)
    assert (
        len(run(core, [request((5, 6), max_new_tokens=3, ignore_eos=True)])[0].output_tokens) == 3
    )


def test_latency_and_gaps_follow_the_clock(make_core: MakeCore) -> None:
    core = make_core()
    ticks = iter(range(100))
    core._clock = lambda: float(next(ticks))
    (response,) = run(core, [request((5,), max_new_tokens=3, ignore_eos=True)])
    assert response.ttft == 1.0
    assert response.itl == [1.0, 1.0]
    assert response.latency == 4.0


def _sliding() -> MistralConfig:
    return MistralConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        sliding_window=6,
        max_position_embeddings=128,
    )


def _mixed() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        intermediate_size=64,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=1,
        max_position_embeddings=128,
    )


def _llama() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        intermediate_size=64,
        max_position_embeddings=128,
    )


@pytest.mark.parametrize("config", [_sliding(), _mixed(), _llama()], ids=lambda c: c.model_type)
def test_other_architectures_agree_with_their_own_attention(config: object) -> None:
    torch.manual_seed(1)
    reference = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation="eager"
    ).eval()
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation=ATTENTION
    ).eval()
    with torch.no_grad():
        for item in reference.parameters():
            item.mul_(4.0)
    model.load_state_dict(reference.state_dict())
    probe(model, tolerance=1e-3)
    core = EmbeddedCore(
        model, ModelLimits(50, 128, (EOS,), None), WeightVersion("inc", 0), CoreOptions(4)
    )
    given = [
        request(p, seed=i, max_new_tokens=20, ignore_eos=True) for i, p in enumerate(prompts(6))
    ]
    for item, response in zip(given, run(core, given), strict=True):
        expected = score_with(reference, item.input_ids, response.output_tokens)
        assert response.output_logprobs == pytest.approx(expected, abs=1e-4)


def test_a_model_that_ignores_the_cache_is_refused(core: EmbeddedCore) -> None:
    attention = core.model.model.layers[1].self_attn
    attention.layer_idx = 0
    try:
        with pytest.raises(CapabilityError, match="1 of 2 layers"):
            probe(core.model, tolerance=1e-3)
    finally:
        attention.layer_idx = 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_decodes_without_its_cache_is_refused(
    make_core: MakeCore, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    model = make_core(dtype=dtype).model
    tolerance = PROBE_TOLERANCE[dtype]
    probe(model, tolerance=tolerance)

    def sees_itself(rows: DecodedRows, *inputs: torch.Tensor, **_: object) -> torch.Tensor:
        value = inputs[3]
        return value.repeat_interleave(inputs[1].shape[1] // value.shape[1], 1)

    monkeypatch.setattr(DecodedRows, "attend", sees_itself)
    with pytest.raises(CapabilityError, match="of what the tokens before change"):
        probe(model, tolerance=tolerance)


def test_bfloat16_generates_finite_logprobs_near_fp32(make_core: MakeCore, score: Scorer) -> None:
    core = make_core(dtype="bfloat16")
    (response,) = run(core, [request((5, 6, 7), seed=0, max_new_tokens=16, ignore_eos=True)])
    expected = score((5, 6, 7), response.output_tokens, 1.0)
    assert response.output_logprobs == pytest.approx(expected, abs=0.5)


def test_a_context_beyond_the_models_own_is_refused(make_core: MakeCore) -> None:
    with pytest.raises(ConfigError, match="max_context: got 100000"):
        make_core(max_context=100_000)


def test_an_unusable_device_is_refused(make_core: MakeCore) -> None:
    with pytest.raises(ConfigError, match=r"inference\.device"):
        make_core(device="not-a-device")
