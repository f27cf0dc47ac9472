"""``tandem model info`` reads a directory without loading the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from tandem.cli import app
from tandem.cli.model import model_facts
from tandem.errors import ConfigError, DataError


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "vocab_size": 10,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(5)}, tmp_path / "model-1.safetensors")
    save_file({"c": torch.zeros(2, dtype=torch.bfloat16)}, tmp_path / "model-2.safetensors")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Fast"}')
    return tmp_path


def test_facts_are_those_of_the_files(model_dir: Path) -> None:
    facts = model_facts(model_dir)
    assert facts["architecture"] == "Qwen3ForCausalLM"
    assert facts["parameters"] == "19"
    assert facts["stored as"].startswith("BF16, F32")
    assert (facts["vocabulary"], facts["context"]) == (10, 64)
    assert (facts["tokenizer"], facts["chat template"]) == ("Fast", "no")
    result = CliRunner().invoke(app, ["model", "info", str(model_dir)])
    assert result.exit_code == 0
    assert "Qwen3ForCausalLM" in result.output


@pytest.mark.parametrize("content", [b"", b"\xff" * 20, b"\x04" + b"\0" * 7 + b"nope"])
def test_damaged_weights_are_named(model_dir: Path, content: bytes) -> None:
    (model_dir / "model-1.safetensors").write_bytes(content)
    with pytest.raises(DataError, match=r"model-1\.safetensors"):
        model_facts(model_dir)


def test_missing_directory_is_a_config_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["model", "info", str(tmp_path / "none")])
    assert isinstance(result.exception, ConfigError)
