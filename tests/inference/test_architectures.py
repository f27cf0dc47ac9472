"""Models of other families, and whole completions, against transformers' own computation."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tandem.inference.embedded.build import probe
from tandem.inference.embedded.core import CoreOptions, EmbeddedCore
from tandem.inference.embedded.linears import MIN_PLAIN_ROWS, PackedLinears, can_pack, min_rows
from tandem.inference.embedded.requests import ModelLimits
from tandem.models.attention import ATTENTION
from tandem.types import WeightVersion
from tandem.weights.bucket import go_on

from .conftest import MakeCore, request, run, score_with
from .test_core import assert_logprobs_agree, prompts

EOS, VOCABULARY = 2, 60
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "eos_token_id": EOS,
}
CONFIGS = [
    LlamaConfig(**COMMON),
    Qwen2Config(**COMMON),
    Qwen3Config(**COMMON, head_dim=16),
    Gemma3TextConfig(
        **COMMON,
        head_dim=16,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=16,
    ),
    Qwen3MoeConfig(
        **COMMON, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
]


def pair(config: PreTrainedConfig) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model with its own attention, and with ours; weights large enough to matter."""
    torch.manual_seed(1)
    reference, model = (
        AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=name).eval()
        for name in ("eager", ATTENTION)
    )
    with torch.no_grad():
        for item in reference.parameters():
            if item.dim() > 1:
                item.mul_(4.0)
    model.load_state_dict(reference.state_dict())
    return reference, model


@pytest.mark.parametrize("is_fast", [True, False], ids=["fast", "matched"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda item: item.model_type)
def test_logprobs_of_every_family_are_those_of_its_own_attention(
    config: PreTrainedConfig, is_fast: bool
) -> None:
    """In chunks, with shared prompts and ragged lengths beyond the sliding window."""
    reference, model = pair(config)
    probe(model, tolerance=1e-3)
    core = EmbeddedCore(
        model,
        ModelLimits(VOCABULARY, 128, (EOS,), None),
        WeightVersion("inc", 0),
        CoreOptions(4, max_tokens_per_pass=24, is_fast=is_fast),
    )
    given = [
        request(p, seed=i, max_new_tokens=20, ignore_eos=True) for i, p in enumerate(prompts(6))
    ]
    given.append(request(given[0].input_ids, seed=9, max_new_tokens=20, ignore_eos=True))
    for item, response in zip(given, run(core, given), strict=True):
        assert_logprobs_agree(
            response.output_logprobs,
            score_with(reference, item.input_ids, response.output_tokens),
        )


def test_greedy_completions_equal_generate_of_transformers(
    make_core: MakeCore, reference: PreTrainedModel
) -> None:
    """On 60 prompts, except where its two best logits are so close that rounding decides."""
    given = prompts(60, low=2, high=60)
    ours = run(
        make_core(max_batch_size=16), [request(p, greedy=True, max_new_tokens=16) for p in given]
    )
    close = 0
    for prompt, response in zip(given, ours, strict=True):
        with torch.inference_mode():
            theirs = reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                do_sample=False,
                max_new_tokens=16,
                eos_token_id=EOS,
                pad_token_id=0,
                output_scores=True,
                return_dict_in_generate=True,
            )
        expected = theirs.sequences[0, len(prompt) :].tolist()
        if response.output_tokens != expected:
            pairs = zip(response.output_tokens, expected, strict=False)
            at = next(i for i, (a, b) in enumerate(pairs) if a != b)
            best = theirs.scores[at][0].topk(2).values
            assert float(best[0] - best[1]) < 1e-4
            close += 1
    assert close <= 1


def test_packed_linears_follow_the_weights_only_when_told() -> None:
    layer = torch.nn.Linear(24, 40)
    rows = torch.randn(5, 24)
    before = layer(rows).detach()
    model = torch.nn.Sequential(layer)
    packed = PackedLinears(model)
    with torch.no_grad():
        layer.weight.mul_(2.0)
        layer.bias.zero_()
    packed.use(packed.lay_out(lambda parameter: parameter.detach(), go_on))
    with torch.inference_mode():
        after = model(rows)
    expected = rows @ layer.weight.detach().T
    torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(after, before, atol=1e-2)


def test_a_pass_is_filled_up_only_where_rows_depend_on_their_number() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(24, 40))
    assert min_rows(model, None) == MIN_PLAIN_ROWS
    assert min_rows(model.bfloat16(), None) == 1
    model = torch.nn.Sequential(torch.nn.Linear(24, 40))
    if can_pack(model):
        packed = PackedLinears(model)
        assert packed.is_row_invariant()
        assert min_rows(model, packed) == 1


@pytest.mark.parametrize("numerics", ["matched", "fast"])
def test_logprobs_do_not_depend_on_other_requests_in_a_single_bit(
    make_core: MakeCore, numerics: str
) -> None:
    """All of one length, so that fused attention kernels do the same for a row."""
    core, draw = make_core(numerics=numerics), random.Random(2)
    given = [
        request(
            [draw.randrange(4, 50) for _ in range((20, 110, 58, 70)[i % 4])],
            seed=i,
            max_new_tokens=10,
            ignore_eos=True,
        )
        for i in range(12)
    ]
    together = run(core, given)
    for item, response in zip(given[:4], together, strict=False):
        (alone,) = run(make_core(numerics=numerics), [item])
        assert alone.output_tokens == response.output_tokens
        assert alone.output_logprobs == response.output_logprobs


def test_bf16_layers_compute_many_rows_in_full_precision_and_few_near_it() -> None:
    layer = torch.nn.Linear(64, 48, dtype=torch.bfloat16)
    model = torch.nn.Sequential(layer)
    if not can_pack(model):
        pytest.skip("no packed product here")
    packed = PackedLinears(model)
    with torch.no_grad():
        layer.weight.mul_(3.0)
        layer.bias.add_(1.0)
    packed.use(packed.lay_out(lambda parameter: parameter.detach(), go_on))
    rows = torch.randn(40, 64).bfloat16()
    exact = rows.double() @ layer.weight.detach().double().T + layer.bias.detach().double()
    with torch.inference_mode():
        for count in (1, 2, 3, 15, 16, 40):
            found = model(rows[None, :count])[0]
            assert found.dtype == torch.bfloat16
            gap = (found.double() - exact[:count]).abs().max()
            assert gap <= 2**-8 * exact.abs().max()


def test_layers_with_the_same_input_are_one_product_and_keep_their_own_results() -> None:
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = torch.nn.Linear(24, 32)
            self.k_proj = torch.nn.Linear(24, 16)
            self.v_proj = torch.nn.Linear(24, 16)

    model = Attention()
    if not can_pack(model):
        pytest.skip("no packed product here")
    one, other = torch.randn(5, 24), torch.randn(5, 24)
    layers = (model.q_proj, model.k_proj, model.v_proj)
    with torch.inference_mode():
        expected = {id(x): [layer(x) for layer in layers] for x in (one, other)}
        PackedLinears(model)
        for order in ([(one, 0), (one, 1), (one, 2)], [(one, 2), (other, 1), (one, 0), (one, 0)]):
            for x, index in order:
                found = layers[index](x)
                torch.testing.assert_close(found, expected[id(x)][index], rtol=1e-5, atol=1e-5)


def test_bf16_passes_of_many_rows_stay_in_full_precision_and_cache_in_bf16() -> None:
    """Against the same weights in fp32: nearer than bf16 between layers could be."""
    reference, model = pair(CONFIGS[0])
    model = model.bfloat16()
    if not can_pack(model):
        pytest.skip("no packed product here")
    reference = reference.bfloat16().float()
    core = EmbeddedCore(
        model,
        ModelLimits(VOCABULARY, 128, (EOS,), None),
        WeightVersion("inc", 0),
        CoreOptions(20, is_fast=True),
    )
    given = [
        request((3 + i, 4, 5, 6), seed=i, max_new_tokens=4, ignore_eos=True) for i in range(20)
    ]
    responses = run(core, given)
    shelves = core._cache._shelves.values()
    assert {item.dtype for shelf in shelves for item in shelf.tensors} == {torch.bfloat16}
    gaps = []
    for item, response in zip(given, responses, strict=True):
        theirs = score_with(reference, item.input_ids, response.output_tokens)
        pairs = zip(response.output_logprobs, theirs, strict=True)
        gaps += [abs(a - float(b)) for a, b in pairs]
    assert sum(gaps) / len(gaps) < 0.02
