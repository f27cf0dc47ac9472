"""The sampler's and the train engine's log-probabilities are the same numbers, bit for bit."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, Qwen3Config

from tandem.config import InferenceConfig
from tandem.config.schema import TrainConfig
from tandem.errors import CapabilityError, ConfigError
from tandem.inference.embedded.bits import check_bits
from tandem.inference.embedded.build import build_core
from tandem.train import EngineRegistry
from tandem.trainers import run_rl
from tandem.types import FinetuneSpec, GenerationConfig, LLMRequest
from tests.runs.conftest import metrics

VOCABULARY = 700
MISMATCH = "mismatch/same_version_max"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """Wider than a block of the softmax's normaliser, and longer than a block of keys."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=96, intermediate_size=160, num_hidden_layers=3,
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4.0)
    path = tmp_path_factory.mktemp("bits") / "model"
    model.save_pretrained(path)
    return str(path)


def generate(core, lengths, temperature):
    for ticket, length in enumerate(lengths):
        ids = [(11 * i + ticket) % VOCABULARY for i in range(length)]
        config = GenerationConfig(max_new_tokens=9, temperature=temperature, seed=ticket)
        core.add(ticket, LLMRequest(f"r{ticket}", ids, config))
    found = {}
    while core.has_work:
        found |= {done.ticket: done.outcome for done in core.step()}
    return [found[ticket] for ticket in range(len(lengths))]


def test_train_engine_gives_the_sampled_log_probabilities_bit_for_bit(model_dir):
    core = build_core(InferenceConfig(max_batch_size=5), model_dir, "a")
    lengths = [3, 17, 17, 40, 90, 90, 280, 5]
    responses = generate(core, lengths, 0.7)
    rows = [[*r.input_tokens, *r.output_tokens] for r in responses]
    width = max(map(len, rows))
    batch = TensorDict(
        {
            "input_ids": torch.tensor([row + [0] * (width - len(row)) for row in rows]),
            "attention_mask": torch.arange(width) < torch.tensor([[len(row)] for row in rows]),
            "temperature": torch.full((len(rows),), 0.7),
        },
        batch_size=[len(rows)],
    )
    config = TrainConfig(device="cpu", max_tokens_per_microbatch=300)
    engine = EngineRegistry.new("language_model", "local", config=config, model_path=model_dir)
    engine.initialize(ft_spec=FinetuneSpec(1, 10, 1))
    logprobs = engine.forward(batch, outputs=["train_logprobs"])["train_logprobs"]
    engine.destroy()
    for row, (response, length) in enumerate(zip(responses, lengths, strict=True)):
        made = torch.tensor(response.output_logprobs)
        assert made.min() < -1.0
        assert torch.equal(logprobs[row, length : length + len(made)], made)


def test_self_test_passes_in_fp32_and_refuses_bf16(model_dir):
    check_bits(build_core(InferenceConfig(), model_dir, "a"))
    with pytest.raises(CapabilityError, match=r"deterministic.*allowed: 0"):
        check_bits(build_core(InferenceConfig(dtype="bfloat16"), model_dir, "a"))


def test_deterministic_run_has_no_mismatch_at_all(bed):
    overrides = (
        "steps=3", "inference.deterministic=true", "inference.device=cpu", "train.device=cpu",
        "run.threads=1", "inference.mode=process",
    )  # fmt: skip
    summary = run_rl(bed.config(*overrides))
    seen = [row[MISMATCH] for row in metrics(bed.run_dir()) if MISMATCH in row]
    assert seen == [0.0] * len(seen) != []
    assert summary["mismatch_max"] == 0.0


def test_deterministic_mode_refuses_what_would_break_it(bed):
    with pytest.raises(ConfigError, match=r"inference\.dtype=float32"):
        bed.config("inference.deterministic=true", "inference.dtype=bfloat16")
    with pytest.raises(ConfigError, match=r"run\.threads=1"):
        bed.config(
            "inference.deterministic=true", "inference.device=cpu", "train.device=cpu",
            "run.threads=2",
        )  # fmt: skip
