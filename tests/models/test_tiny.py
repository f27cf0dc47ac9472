"""Tiny models: an exact character tokenizer and weights that are a function of the seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tandem.config.schema import ModelConfig, TinyModelConfig
from tandem.errors import ConfigError
from tandem.models.loading import load_causal_lm, load_tokenizer, resolve_model
from tandem.models.tiny import character_tokenizer, save_tiny_model

SMALL: dict[str, Any] = {
    "alphabet": "ab \n",
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "intermediate_size": 32,
    "max_position": 64,
}


def small(**changes: Any) -> TinyModelConfig:
    return TinyModelConfig(**{**SMALL, **changes})


@pytest.mark.parametrize(
    "text", ["", "a", " a  b ", "\n\na", "12 + 3 = 15.\n", "{}()<>\\\"'", "é中🙂", "pad eos"]
)
def test_every_text_over_the_alphabet_survives_the_round_trip(tmp_path: Path, text: str) -> None:
    alphabet = "".join(sorted(set("ab \n0123456789+=.{}()<>\\\"'é中🙂pdeos")))
    made = character_tokenizer(alphabet)
    made.save_pretrained(tmp_path)
    for tokenizer in (made, load_tokenizer(str(tmp_path))):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([*ids, 2, 0, 0], skip_special_tokens=True) == text


@pytest.mark.parametrize("alphabet", ["", "abca"])
def test_alphabet_without_or_with_repeated_characters_is_refused(alphabet: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.tiny\.alphabet"):
        character_tokenizer(alphabet)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hidden_size": 18, "num_heads": 4}, "hidden_size"),
        ({"hidden_size": 10, "num_heads": 2}, "hidden_size"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, int], field: str
) -> None:
    with pytest.raises(ConfigError, match=rf"model\.tiny\.{field}"):
        save_tiny_model(small(**changes), tmp_path / "m", seed=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_resolved_directory_loads_with_its_special_tokens(
    tmp_path: Path, architecture: Any
) -> None:
    config = ModelConfig(tiny=small(architecture=architecture))
    path = resolve_model(config, seed=0, workdir=tmp_path)
    model = load_causal_lm(path, dtype=torch.float32, device="cpu")
    tokenizer = load_tokenizer(path)
    assert model.config.model_type == architecture
    assert model.config.vocab_size == len(tokenizer) == 8
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id == 0


def test_weights_depend_on_the_seed_and_not_on_the_global_random_state(tmp_path: Path) -> None:
    def weights(name: str, seed: int, global_seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        save_tiny_model(small(), tmp_path / name, seed=seed)
        assert torch.equal(torch.get_rng_state(), before)
        return load_file(tmp_path / name / "model.safetensors")

    first, again, other = weights("a", 1, 10), weights("b", 1, 20), weights("c", 2, 10)
    assert all(torch.equal(first[name], again[name]) for name in first)
    name = "model.embed_tokens.weight"
    assert not torch.equal(first[name], other[name])


def test_same_model_is_reused_and_another_never_overwritten(tmp_path: Path) -> None:
    target = save_tiny_model(small(), tmp_path / "m", seed=1)
    stamp = (target / "model.safetensors").stat().st_mtime_ns
    assert save_tiny_model(small(), target, seed=1) == target
    assert (target / "model.safetensors").stat().st_mtime_ns == stamp
    with pytest.raises(ConfigError, match="holds another model"):
        save_tiny_model(small(), target, seed=2)
    with pytest.raises(ConfigError, match="holds another model"):
        save_tiny_model(small(hidden_size=32), target, seed=1)
