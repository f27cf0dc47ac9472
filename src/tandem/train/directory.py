"""Hugging Face directories: what ``save`` writes and ``load`` reads.

Checkpoints of a run are ``state``.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch import Tensor

from tandem.errors import CheckpointError, ConfigError, DataError
from tandem.models.directories import new_directory
from tandem.models.heads import load_model, pad_apart_from_end
from tandem.train import lora as adapters
from tandem.train.export import full_tensors, is_tied
from tandem.train.ranks import on_first_rank, opened_by_first_rank
from tandem.train.shards import class_name, compact
from tandem.train.state import (
    copy_from_first_rank,
    read_training_state,
    whole_tensors,
    write_training_state,
)
from tandem.types import SaveLoadMeta

if TYPE_CHECKING:
    from tandem.train.engine import TrainEngine

OPTIM_FOLDER = "training_state"
"""Where ``with_optim`` puts what a Hugging Face directory has no place for."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


def save_directory(engine: TrainEngine, meta: SaveLoadMeta) -> None:
    """Write the merged model or the adapter alone; see ``TrainEngine.save``."""
    if meta.weight_format not in ("hf", "adapter"):
        raise ConfigError(f"weight_format: got {meta.weight_format!r}, allowed: hf, adapter")
    if meta.weight_format == "adapter" and engine.lora is None:
        raise ConfigError("weight_format=adapter: there is no adapter; configure model.lora")
    with opened_by_first_rank(engine, lambda: _staged(meta.path)) as target:
        _write(engine, meta, target)


@contextmanager
def _staged(path: str) -> Iterator[Path]:
    try:
        with new_directory(Path(path), replace=True) as target:
            yield target
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {path!r}: {error}") from error


def _write(engine: TrainEngine, meta: SaveLoadMeta, target: Path | None) -> None:
    """``target`` is None on the ranks that only help to make tensors whole."""
    if meta.weight_format == "adapter":
        tensors = whole_tensors(engine, adapters.adapter_tensors(engine.model))
    else:
        stream = full_tensors(engine.model, engine._full_tensor, None)
        tensors = {name: t.cpu() for name, t in stream if engine.is_first_rank}

    def write() -> None:
        assert target is not None
        if meta.weight_format == "adapter":
            adapters.save_adapter(tensors, engine.peft_config, target)
            return
        _write_model(engine.model, target, tensors)
        _write_tokenizer(meta, target, source=meta.base_model_path or engine.model_path)

    on_first_rank(engine, write)
    if meta.with_optim:
        write_training_state(engine, None if target is None else target / OPTIM_FOLDER)


def load_directory(engine: TrainEngine, meta: SaveLoadMeta) -> None:
    """Take weights, an adapter or a whole training state; see ``TrainEngine.load``."""
    folder = Path(meta.path) / OPTIM_FOLDER
    if meta.with_optim:
        read_training_state(engine, folder)
    elif engine.lora is not None:
        own = adapters.adapter_tensors(engine.model)
        found = on_first_rank(engine, lambda: adapters.read_adapter(engine.model, meta.path))
        copy_from_first_rank(engine, own, found)
    else:
        own = dict(engine.model.state_dict(keep_vars=True))
        weights = on_first_rank(engine, lambda: _read_weights(engine, meta.path))
        copy_from_first_rank(engine, own, weights)


def _write_model(model: Any, target: Path, tensors: Mapping[str, Tensor]) -> None:
    state = {name: compact(tensor) for name, tensor in tensors.items()}
    floating = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
    config = copy.deepcopy(model.config)
    config.use_cache = True
    config.tie_word_embeddings = is_tied(model)
    config.architectures = [class_name(model)]
    config.dtype = str(floating).removeprefix("torch.")
    pad_apart_from_end(model, config)
    config.save_pretrained(target)
    if model.can_generate():
        model.generation_config.save_pretrained(target)
    save_torch_state_dict(state, target, metadata={"format": "pt"})


def _write_tokenizer(meta: SaveLoadMeta, target: Path, *, source: str) -> None:
    for part in (meta.tokenizer, meta.processor):
        if part is not None:
            part.save_pretrained(target)
    if meta.tokenizer is None:
        for name in TOKENIZER_FILES:
            if (Path(source) / name).is_file():
                shutil.copyfile(Path(source) / name, target / name)


def _read_weights(engine: TrainEngine, path: str) -> Mapping[str, Tensor]:
    model = load_model(engine.model_type, path, dtype=torch.float32, device="cpu")
    source, own = model.state_dict(), engine.model.state_dict()
    problems = [f"{name} is missing" for name in sorted(own.keys() - source.keys())]
    problems += [
        f"{name} has shape {list(source[name].shape)}, expected {list(own[name].shape)}"
        for name in sorted(own.keys() & source.keys())
        if own[name].shape != source[name].shape
    ]
    if problems:
        raise DataError(f"{path!r} does not fit this model: {'; '.join(problems)}")
    return source
