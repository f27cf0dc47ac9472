"""Recorded decoding passes: the bits of plain ones, under any weights, or none at all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tandem.inference.embedded import recorded
from tandem.inference.embedded.core import CoreOptions, EmbeddedCore
from tandem.inference.embedded.recorded import RecordedDecode
from tandem.inference.embedded.requests import ModelLimits
from tandem.models.attention import ATTENTION
from tandem.types import LLMResponse, WeightUpdateMeta, WeightVersion
from tandem.weights import expect, publish, release

from .conftest import commit, request, run
from .test_architectures import COMMON

LONG = {**COMMON, "max_position_embeddings": 512}
DENSE = Qwen3Config(**LONG, head_dim=16)
SLIDING = Gemma3TextConfig(
    **LONG,
    head_dim=16,
    sliding_window=7,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    query_pre_attn_scalar=16,
)


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "WARM_PASSES", 3)


def make(
    config: PreTrainedConfig,
    records: bool,
    *,
    dtype: torch.dtype = torch.float32,
    is_fast: bool = False,
) -> EmbeddedCore:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=ATTENTION)
    with torch.no_grad():
        for item in model.parameters():
            if item.dim() > 1:
                item.mul_(4.0)
    options = CoreOptions(64, max_tokens_per_pass=24, is_fast=is_fast, records_decoding=records)
    limits = ModelLimits(COMMON["vocab_size"], 500, (2,), None)
    version = WeightVersion("inc", 0)
    return EmbeddedCore(model.to(dtype).requires_grad_(False), limits, version, options)


def bits(responses: Sequence[LLMResponse]) -> list[tuple[list[int], list[float]]]:
    return [(item.output_tokens, item.output_logprobs) for item in responses]


def crowd() -> list[Any]:
    """From one row to twenty and back, on three shelves."""
    short = [
        request((3 + i, 4, 5), seed=i, max_new_tokens=9 + 8 * i, ignore_eos=True) for i in range(19)
    ]
    return [*short, request((9, 8, 7), seed=99, max_new_tokens=300, ignore_eos=True)]


@pytest.mark.parametrize(
    ("dtype", "is_fast"),
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True)],
    ids=["matched", "fast", "bf16"],
)
@pytest.mark.parametrize("config", [DENSE, SLIDING], ids=lambda item: item.model_type)
def test_recorded_passes_give_the_bits_of_plain_ones(
    config: PreTrainedConfig, dtype: torch.dtype, is_fast: bool
) -> None:
    plain, core = (make(config, on, dtype=dtype, is_fast=is_fast) for on in (False, True))
    assert bits(run(core, crowd())) == bits(run(plain, crowd()))
    assert core.num_recorded >= 3  # many rows on one shelf, on two, and one row
    assert plain.num_recorded == 0


@pytest.mark.parametrize("is_fast", [False, True], ids=["matched", "fast"])
def test_new_weights_serve_in_recorded_passes_from_their_token_on(is_fast: bool) -> None:
    plain, core = (make(DENSE, on, is_fast=is_fast) for on in (False, True))
    weights = {name: 1.5 * item.detach() for name, item in plain.weights.parameters.items()}
    found: list[list[LLMResponse]] = []
    for one in (plain, core):
        responses = run(one, crowd()[:4])
        meta = WeightUpdateMeta("inprocess", 1, incarnation="inc", channel="recorded")
        arrival = expect(meta)
        publish(meta, one.weights.specs, weights.items())
        commit(one, arrival.result(0))
        found.append(responses + run(one, crowd()[:4]))
        release("recorded")
    assert core.num_recorded > 0
    assert bits(found[1]) == bits(found[0])
    assert found[1][0].output_logprobs != found[1][4].output_logprobs


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_experts_are_recorded_only_where_no_python_chooses_them(experts: str) -> None:
    config = Qwen3MoeConfig(
        **LONG, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    )
    config._experts_implementation = experts
    plain, core = (make(config, on) for on in (False, True))
    given = [request((3 + i, 4), seed=i, max_new_tokens=20 + i, ignore_eos=True) for i in range(5)]
    assert bits(run(core, given)) == bits(run(plain, given))
    assert (core.num_recorded == 0) == (experts == "eager")


def decode(
    plain: Callable[[Tensor], Tensor], weights: Sequence[Tensor], steps: int = 12
) -> tuple[RecordedDecode, list[Tensor]]:
    """``plain`` of (1, 1), (2, 2), ... through the recorder, with its results."""
    recorder = RecordedDecode(lambda: list(weights))
    outs = []
    for step in range(steps):
        given = torch.full((1 + step % 3,), float(step))
        outs.append(recorder.run((0,), given.shape, [given], lambda given=given: plain(given)))
    return recorder, outs


def test_one_recording_serves_all_sizes_and_current_values() -> None:
    weight = torch.tensor([2.0, 3.0])

    def plain(given: Tensor) -> Tensor:
        return given[:, None] * weight + given.shape[0]

    recorder, outs = decode(plain, [weight])
    assert recorder.num_recorded == 1
    for step, out in enumerate(outs):
        count = 1 + step % 3
        assert out.tolist() == [[2.0 * step + count, 3.0 * step + count]] * count


def test_a_tensor_that_no_update_could_replace_is_refused() -> None:
    hidden, weight = torch.tensor([2.0, 3.0]), torch.ones(1)
    recorder, outs = decode(lambda given: given[:, None] * hidden + weight, [weight])
    assert recorder.num_recorded == 0
    assert "neither a weight nor computed" in str(recorder.refusal)
    assert outs[-1][0].tolist() == [23.0, 34.0]


def test_results_whose_size_depends_on_values_are_refused() -> None:
    recorder, _ = decode(lambda given: (given > 3).nonzero().sum().reshape(1), [])
    assert "depends on values" in str(recorder.refusal)


def test_other_code_that_reads_values_is_refused() -> None:
    recorder, outs = decode(lambda given: given * 2 if bool(given[0] > 5) else given, [])
    assert "asks a tensor for its value" in str(recorder.refusal)
    assert [float(out[0]) for out in outs[5:8]] == [5.0, 12.0, 14.0]


def test_other_bits_than_those_of_the_plain_pass_are_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = [0]

    def plain(given: Tensor) -> Tensor:
        calls[0] += 1
        return given + calls[0]

    recorder, outs = decode(plain, [])
    assert recorder.num_recorded == 0
    assert "does not give the bits" in str(recorder.refusal)
    assert "does not give the bits" in caplog.text
    assert float(outs[-1][0]) == 11.0 + calls[0]


def test_a_recording_that_fails_at_other_sizes_is_refused() -> None:
    """As of a model that reads a size in a way which the tracer does not see."""
    recorder, outs = decode(lambda given: given.view(given.untyped_storage().nbytes() // 4) * 2, [])
    assert recorder.num_recorded == 0
    assert "fails at other sizes" in str(recorder.refusal)
    assert [len(out) for out in outs] == [1 + step % 3 for step in range(12)]
    assert float(outs[-1][0]) == 22.0
