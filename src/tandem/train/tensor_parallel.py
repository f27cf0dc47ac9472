"""Tensor parallelism: layers divided over ranks that see the same tokens, by the model's own plan.

Parameters become DTensors; activations stay plain tensors outside the divided layers, so the
model's code runs unchanged on its share of heads and features. Sharding over data-parallel ranks
comes after this and is the backend's.
"""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Callable, Iterator
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tandem.errors import CapabilityError
from tandem.train.lora import ADAPTER

log = logging.getLogger(__name__)

HEADS = ("num_attention_heads", "num_key_value_heads")

IGNORED = ("colwise_gather_output", "embedding_rowwise")
"""Entries of a plan for embeddings and the output projection, which stay whole here."""


def divide_layers(model: Any, mesh: DeviceMesh) -> None:
    """Divide the layers of ``model`` over ``mesh``, in place.

    A block (attention, feed-forward) whose heads or features do not divide by the number of ranks
    is computed whole on each of them.

    Raises:
        CapabilityError: the model has no plan, or one with entries that are not known here.
    """
    entries = list(_planned(model))
    if not entries:
        raise CapabilityError(
            f"{type(model).__name__} has no tensor-parallel plan (base_model_tp_plan); use "
            "train.parallel.tensor=1"
        )
    whole = _indivisible(model, entries, mesh.size())
    if whole:
        log.warning(
            "train.parallel.tensor=%d does not divide %s: these blocks are computed whole on "
            "every rank",
            mesh.size(),
            ", ".join(sorted({_generic(name) for name in whole})),
        )
    for name, module, style in entries:
        if _parent(name) not in whole:
            _STYLES[style](module, mesh)


def _planned(model: Any) -> Iterator[tuple[str, nn.Module, str]]:
    """Name, module and style of everything the plan divides."""
    plan: dict[str, str] = dict(model.tp_plan or {})
    for name, module in model.named_modules():
        for pattern, style in plan.items():
            if not fnmatch.fnmatchcase(name, pattern) or name.count(".") != pattern.count("."):
                continue
            if style in IGNORED:
                continue
            if style not in _STYLES:
                raise CapabilityError(
                    f"{type(model).__name__}: the tensor-parallel plan has {style!r} for {name}, "
                    f"supported: {', '.join(_STYLES)}; use train.parallel.tensor=1"
                )
            yield name, module, style


def _indivisible(model: Any, entries: list[tuple[str, nn.Module, str]], size: int) -> set[str]:
    """Names of the blocks of which a part does not divide."""
    config = model.config.get_text_config()
    heads = [getattr(config, key, None) or size for key in HEADS]
    found = set()
    for name, module, style in entries:
        is_attention = hasattr(model.get_submodule(_parent(name)), "head_dim")
        dim = {"colwise": 0, "rowwise": 1}.get(style)
        weight = getattr(module, "weight", None)
        features = size if dim is None or weight is None else weight.shape[dim]
        if features % size or (is_attention and any(count % size for count in heads)):
            found.add(_parent(name))
    return found


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _generic(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


# --- styles ---------------------------------------------------------------------------------------


def _colwise(module: nn.Module, mesh: DeviceMesh) -> None:
    """Each rank computes some of the output features."""
    if isinstance(module, BaseTunerLayer):
        _colwise(module.base_layer, mesh)
        _colwise(module.lora_B[ADAPTER], mesh)
        return
    _distribute(module, mesh, lambda name: Shard(0))
    _wrap(module, mesh, takes=Replicate(), gives=Shard(-1))


def _rowwise(module: nn.Module, mesh: DeviceMesh) -> None:
    """Each rank has some of the input features; their contributions are summed."""
    if isinstance(module, BaseTunerLayer):
        _rowwise(module.base_layer, mesh)
        _rowwise(module.lora_A[ADAPTER], mesh)
        return
    _distribute(module, mesh, lambda name: Shard(1) if name == "weight" else Replicate())
    _wrap(module, mesh, takes=Shard(-1), gives=Replicate())


def _headwise(module: nn.Module, mesh: DeviceMesh) -> None:
    """Whole parameters applied to each rank's own heads, whose gradients are summed."""
    _distribute(module, mesh, lambda name: Replicate())
    _wrap(module, mesh, takes=Shard(-2), gives=Shard(-2))


_STYLES: dict[str, Callable[[nn.Module, DeviceMesh], None]] = {
    "colwise": _colwise,
    "rowwise": _rowwise,
    "replicated_with_grad_allreduce": _headwise,
}


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Callable[[str], Placement]) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        sharded = distribute_tensor(parameter.detach(), mesh, [placement(name)], src_data_rank=None)
        setattr(module, name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))


def _wrap(module: nn.Module, mesh: DeviceMesh, *, takes: Placement, gives: Placement) -> None:
    """Let ``module`` see DTensors, and its callers plain ones."""

    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        placement = _positive(takes, args[0].ndim)
        return (DTensor.from_local(args[0], mesh, [placement], run_check=False), *args[1:])

    def after(_: nn.Module, args: tuple[Any, ...], output: DTensor) -> Tensor:
        placement = _positive(gives, output.ndim)
        local: Tensor = output.redistribute(placements=[placement]).to_local()
        return local

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def _positive(placement: Placement, ndim: int) -> Placement:
    if isinstance(placement, Shard) and placement.dim < 0:
        return Shard(placement.dim + ndim)
    return placement
