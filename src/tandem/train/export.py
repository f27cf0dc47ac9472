"""Weights on their way out: names on disk, the tensor stream, a Hugging Face directory.

Moving a version to an inference engine is ``tandem.weights``; training state is ``state``.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from tandem.errors import CheckpointError
from tandem.train.lora import merged_weight
from tandem.types import ParamSpec

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

FullTensor = Callable[[Tensor], Tensor]


def full_tensors(
    model: Any, full_tensor: FullTensor, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor once, by its name on disk, adapters merged, floating point in ``dtype``.

    Lazy unless the architecture stores its weights in another form than it holds them. Yielded
    tensors may share memory with the model: read them before the next step.
    """
    stream = _own_tensors(model, full_tensor)
    if getattr(model, "_weight_conversions", None):
        stream = iter(revert_weight_conversion(model, dict(stream)).items())
    for name, tensor in stream:
        yield name, tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor


def param_specs(model: Any, dtype: torch.dtype | None) -> list[ParamSpec]:
    """What ``full_tensors`` will yield, in its order, without computing it."""
    stream: Any = ((name, tensor) for name, tensor, _ in _named_tensors(model))
    if getattr(model, "_weight_conversions", None):
        stream = full_tensors(model, lambda tensor: tensor, None)
    return [
        spec_of(name, tensor, dtype if dtype and tensor.is_floating_point() else tensor.dtype)
        for name, tensor in stream
    ]


def spec_of(name: str, tensor: Tensor, dtype: torch.dtype) -> ParamSpec:
    return ParamSpec(name, tuple(tensor.shape), str(dtype).removeprefix("torch."))


def is_tied(model: Any) -> bool:
    """Whether input and output embeddings are one parameter; the config's claim does not count."""
    output = model.get_output_embeddings()
    return output is not None and output.weight is model.get_input_embeddings().weight


def save_model(
    model: Any,
    path: Path,
    tensors: Iterator[tuple[str, Tensor]],
    *,
    tokenizer: Any | None,
    processor: Any | None,
    source: str,
) -> None:
    """Write a Hugging Face directory; an existing one is replaced only once the new is complete."""
    with replacing(path) as target:
        config = copy.deepcopy(model.config)
        config.use_cache = True
        config.tie_word_embeddings = is_tied(model)
        config.architectures = [type(model).__name__]
        state = {name: tensor.contiguous() for name, tensor in tensors}
        floating = next(t.dtype for t in state.values() if t.is_floating_point())
        config.dtype = str(floating).removeprefix("torch.")
        config.save_pretrained(target)
        if model.can_generate():
            model.generation_config.save_pretrained(target)
        save_torch_state_dict(state, target, metadata={"format": "pt"})
        for part in (tokenizer, processor):
            if part is not None:
                part.save_pretrained(target)
        if tokenizer is None:
            copy_tokenizer(Path(source), target)


def copy_tokenizer(source: Path, target: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


class replacing:
    """Context: a fresh directory beside ``path`` that takes its place on success."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fresh = path.with_name(f"{path.name}.writing")
        self._old = path.with_name(f"{path.name}.replaced")

    def __enter__(self) -> Path:
        shutil.rmtree(self._fresh, ignore_errors=True)
        try:
            self._fresh.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"cannot write {str(self._path)!r}: {error}") from error
        return self._fresh

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            shutil.rmtree(self._fresh, ignore_errors=True)
            if isinstance(error, OSError):
                raise CheckpointError(f"cannot write {str(self._path)!r}: {error}") from error
            return
        shutil.rmtree(self._old, ignore_errors=True)
        if self._path.exists():
            os.rename(self._path, self._old)
        os.rename(self._fresh, self._path)
        shutil.rmtree(self._old, ignore_errors=True)


def _named_tensors(model: Any) -> Iterator[tuple[str, Tensor, BaseTunerLayer | None]]:
    """Name on disk, tensor, and the adapter layer whose delta belongs to it."""
    adapted = {
        f"{name}.base_layer.weight": module
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer)
    }
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if ".lora_" in name or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        yield name.replace(".base_layer", ""), tensor, adapted.get(name)


def _own_tensors(model: Any, full_tensor: FullTensor) -> Iterator[tuple[str, Tensor]]:
    for name, tensor, layer in _named_tensors(model):
        full = full_tensor(tensor.detach())
        with torch.no_grad():
            yield name, full if layer is None else merged_weight(layer, full)
