"""Strict loading: what is missing, surplus or mis-shaped is named; nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.config.schema import ModelConfig, TinyModelConfig
from tandem.errors import ConfigError, DataError
from tandem.models.attention import ATTENTION
from tandem.models.loading import load_causal_lm, load_tokenizer, resolve_model
from tandem.models.tiny import save_tiny_model

TINY = TinyModelConfig(
    alphabet="ab", hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=32
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_tiny_model(TINY, tmp_path / "m", seed=0)


def change(directory: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_comes_in_eval_mode_with_our_attention_and_no_cache(
    directory: Path, dtype: torch.dtype
) -> None:
    model = load_causal_lm(str(directory), dtype=dtype, device="cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert not model.training
    assert model.config._attn_implementation == ATTENTION
    assert model.config.use_cache is False


def test_missing_surplus_and_misshaped_tensors_are_all_named_in_one_error(directory: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.surplus.weight"] = torch.zeros(1)
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(8, 16)

    change(directory, edit)
    with pytest.raises(DataError) as caught:
        load_causal_lm(str(directory), dtype=torch.float32, device="cpu")
    message = str(caught.value)
    assert "model.norm.weight is missing" in message
    assert "model.surplus.weight is unexpected" in message
    assert "up_proj.weight has shape [8, 16], expected [32, 16]" in message


def test_damaged_weights_file_is_an_error(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(DataError, match="damaged"):
        load_causal_lm(str(directory), dtype=torch.float32, device="cpu")


def test_pickled_weights_are_not_read(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    torch.save(weights, directory / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="safetensors"):
        load_causal_lm(str(directory), dtype=torch.float32, device="cpu")


def test_missing_directory_and_missing_config_are_errors_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no directory.*nothing is downloaded"):
        resolve_model(ModelConfig(path="Org/Model"), seed=0, workdir=tmp_path)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve_model(ModelConfig(path=str(tmp_path)), seed=0, workdir=tmp_path)


def test_packaged_model_not_yet_imported_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("smollm2-135m-instruct", "models/smollm2-135m-instruct"):
        with pytest.raises(ConfigError, match="tandem model import smollm2-135m-instruct"):
            resolve_model(ModelConfig(path=path), seed=0, workdir=tmp_path)
    save_tiny_model(TINY, tmp_path / "models" / "smollm2-135m-instruct", seed=0)
    found = resolve_model(ModelConfig(path="smollm2-135m-instruct"), seed=0, workdir=tmp_path)
    assert found == "models/smollm2-135m-instruct"


def test_tokenizer_path_beside_a_tiny_model_is_refused(tmp_path: Path) -> None:
    config = ModelConfig(tiny=TINY, tokenizer_path="somewhere")
    with pytest.raises(ConfigError, match=r"model\.tokenizer_path"):
        resolve_model(config, seed=0, workdir=tmp_path)


def test_tokenizer_without_padding_token_pads_with_eos(directory: Path) -> None:
    file = directory / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in settings.items() if k != "pad_token"}))
    tokenizer = load_tokenizer(str(directory))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2


def test_tokenizer_without_eos_or_without_files_is_refused(directory: Path, tmp_path: Path) -> None:
    file = directory / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in settings.items() if k != "eos_token"}))
    with pytest.raises(ConfigError, match="no eos_token"):
        load_tokenizer(str(directory))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(str(tmp_path / "empty"))
