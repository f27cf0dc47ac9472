"""Weights on their way out: names on disk and the tensor stream.

Moving a version to an inference engine is ``tandem.weights``; writing files is ``directory``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from tandem.train.lora import merged_weight
from tandem.types import ParamSpec

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
        stream = full_tensors(model, _without_memory, None)
    return [
        spec_of(name, tensor, dtype if dtype and tensor.is_floating_point() else tensor.dtype)
        for name, tensor in stream
    ]


def _without_memory(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def spec_of(name: str, tensor: Tensor, dtype: torch.dtype) -> ParamSpec:
    return ParamSpec(name, tuple(tensor.shape), str(dtype).removeprefix("torch."))


def is_tied(model: Any) -> bool:
    """Whether input and output embeddings are one parameter; the config's claim does not count."""
    output = model.get_output_embeddings()
    return output is not None and output.weight is model.get_input_embeddings().weight


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
            yield name, full if layer is None else merged_weight(layer, full, full_tensor)
