"""Causal language models and tokenizers from local Hugging Face directories; never the network.

What belongs here: resolving a ``ModelConfig`` to a directory, and loading one strictly. Building
tiny models is in ``tiny.py``, converting other formats in ``importing.py``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tandem.config.schema import ModelConfig
from tandem.errors import ConfigError, DataError
from tandem.models.attention import ATTENTION
from tandem.models.directories import quiet_transformers
from tandem.models.importing import IMPORTABLE
from tandem.models.tiny import save_tiny_model


def resolve_model(config: ModelConfig, *, seed: int, workdir: Path) -> str:
    """The Hugging Face directory of the model: ``config.path``, or ``workdir/initial_model``.

    The second is the tiny model, built with weights drawn from ``seed`` unless it is there already.
    The tokenizer is that of ``config.tokenizer_path`` when given, else it lies in this directory.

    Raises:
        ConfigError: no such directory, or the tiny model's sizes do not fit together.
    """
    if config.tiny is not None:
        if config.tokenizer_path is not None:
            raise ConfigError(
                f"model.tokenizer_path: got {config.tokenizer_path!r}, allowed: null with "
                "model.tiny, whose tokenizer is made from model.tiny.alphabet"
            )
        return str(save_tiny_model(config.tiny, workdir / "initial_model", seed=seed))
    assert config.path is not None
    path = str(Path("models") / config.path) if config.path in IMPORTABLE else config.path
    _check_directory(path, "model.path", "config.json")
    return path


def load_causal_lm(path: str, *, dtype: torch.dtype, device: str | torch.device) -> PreTrainedModel:
    """The model in eval mode with Tandem's attention: call it with ``position_ids`` and ``ctx``.

    Raises:
        ConfigError: not a Hugging Face model directory, or without safetensors weights.
        DataError: tensors of the file and of the architecture differ (all names are listed).
    """
    model, info = load_pretrained(AutoModelForCausalLM, path, dtype=dtype)
    check_complete(path, info)
    model.config.use_cache = False
    return model.to(device).eval()


def load_pretrained(
    auto_class: Any, path: str, *, dtype: torch.dtype, **options: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model of ``auto_class`` with Tandem's attention, and which tensors did not fit.

    Raises:
        ConfigError: not a Hugging Face model directory, or without safetensors weights.
        DataError: a weights file is damaged.
    """
    _check_directory(path, "model.path", "config.json")
    with quiet_transformers():
        try:
            model, info = auto_class.from_pretrained(
                path,
                dtype=dtype,
                attn_implementation=ATTENTION,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **options,
            )
        except SafetensorError as error:
            raise DataError(f"model {path!r}: a weights file is damaged: {error}") from error
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"model.path {path!r} cannot be loaded: {_first_line(error)}; expected a Hugging "
                "Face causal language model with config.json and *.safetensors"
            ) from error
    return model, info


def context_length(path: str) -> int:
    """Tokens that the model of a directory can attend to, from its config.json.

    Raises:
        ConfigError: not a Hugging Face model directory.
    """
    _check_directory(path, "model.path", "config.json")
    data = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    declared = data.get("text_config", data)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        if isinstance(declared.get(name), int):
            return int(declared[name])
    raise ConfigError(f"model.path: {path!r}: config.json names no max_position_embeddings")


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory; without a padding token of its own it pads with EOS.

    Raises:
        ConfigError: no tokenizer there, or it has no end-of-sequence token.
    """
    _check_directory(path, "tokenizer path", None)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"tokenizer of {path!r} cannot be loaded: {_first_line(error)}; expected "
            "tokenizer.json, or set model.tokenizer_path"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"tokenizer of {path!r} has no eos_token; set it in its config")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


VOCABULARY_FILES = ("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model")


def tokenizer_digest(path: str) -> str | None:
    """sha256 of what maps text to ids in a directory; None if it has no tokenizer.

    The formatting of ``tokenizer.json`` and its padding and truncation do not count.

    Raises:
        DataError: ``tokenizer.json`` is damaged.
    """
    whole = Path(path) / "tokenizer.json"
    digest = hashlib.sha256()
    if whole.is_file():
        try:
            content = json.loads(whole.read_text(encoding="utf-8"))
            content = {k: v for k, v in content.items() if k not in ("padding", "truncation")}
        except (ValueError, AttributeError) as error:
            raise DataError(f"{str(whole)!r} is damaged: {_first_line(error)}") from error
        digest.update(json.dumps(content, sort_keys=True).encode())
        return digest.hexdigest()
    files = [Path(path) / name for name in VOCABULARY_FILES if (Path(path) / name).is_file()]
    for file in files:
        digest.update(f"{file.name}:{file.stat().st_size}:".encode() + file.read_bytes())
    return digest.hexdigest() if files else None


def _check_directory(path: str, field: str, needed: str | None) -> None:
    folder = Path(path)
    if not folder.is_dir():
        hint = "give a local Hugging Face directory (nothing is downloaded at run time)"
        if folder.name in IMPORTABLE:
            hint = f"create it with: tandem model import {folder.name}"
        raise ConfigError(f"{field}: no directory {path!r}; {hint}")
    if needed is not None and not (folder / needed).is_file():
        raise ConfigError(f"{field}: {path!r} has no {needed}; it is not a Hugging Face model")


def check_complete(path: str, info: Mapping[str, Any]) -> None:
    """Raise ``DataError`` naming every tensor that is missing, unexpected or mis-shaped."""
    problems = [
        f"{name} is {label}"
        for key, label in (("missing_keys", "missing"), ("unexpected_keys", "unexpected"))
        for name in sorted(info[key])
    ]
    problems += [
        f"{name} has shape {list(found)}, expected {list(expected)}"
        for name, found, expected in sorted(info["mismatched_keys"])
    ]
    problems += [str(message) for message in info["error_msgs"]]
    if problems:
        raise DataError(
            f"model {path!r}: the weights do not fit its config.json: {'; '.join(problems)}"
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
