"""Low-rank adapters through peft: injection, the reference policy, merging, adapter files.

The base model is never written to: an export adds the delta to a copy of each weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tandem.config.schema import LoraConfig
from tandem.errors import ConfigError, DataError
from tandem.models.heads import head_name, head_parameters, task_type

ADAPTER = "default"
_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."


def inject_adapter(model: Any, config: LoraConfig, *, seed: int) -> Any:
    """Put an fp32 adapter into ``model``, freeze the rest, and return the peft configuration.

    A scalar head is trained in full, in fp32, and belongs to the adapter (``modules_to_save``).
    With ``adapter_path`` the adapter starts from that file, whose own configuration wins; the head
    of a model that starts from a language model's adapter, which has none, is as it was.

    Raises:
        ConfigError: no adapter there, one that cannot be merged into weights, or a target module
            that the model does not have.
        DataError: the file's tensors do not fit.
    """
    head = head_name(model)
    if config.adapter_path is None:
        targets = config.target_modules
        peft_config = peft.LoraConfig(
            task_type=task_type(model),
            r=config.rank,
            lora_alpha=config.alpha,
            lora_dropout=config.dropout,
            target_modules=targets if isinstance(targets, str) else list(targets),
            exclude_modules=None if head is None else [head],
        )
    else:
        if not (Path(config.adapter_path) / "adapter_config.json").is_file():
            raise ConfigError(
                f"lora.adapter_path: {config.adapter_path!r} has no adapter_config.json"
            )
        peft_config = peft.LoraConfig.from_pretrained(config.adapter_path)
        _check_mergeable(peft_config, config.adapter_path)
        has_head = peft_config.task_type != "CAUSAL_LM"
        peft_config.task_type = task_type(model)
        peft_config.inference_mode = False
        peft_config.modules_to_save = None  # peft would wrap the head, which is one parameter here
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(peft_config, model, adapter_name=ADAPTER)
        except ValueError as error:
            raise ConfigError(f"lora.target_modules: {error}") from error
    trained = _trained(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
        if name in trained:
            parameter.data = parameter.data.float()
    if head is not None:
        peft_config.modules_to_save = [head]
    if config.adapter_path is not None:
        found = read_adapter(model, config.adapter_path, with_head=has_head)
        own = adapter_tensors(model)
        _copy({name: own[name] for name in found}, found)
    return peft_config


def _check_mergeable(peft_config: Any, path: str) -> None:
    """What is more than a product of two matrices has no place in the weights that are served."""
    for name in ("lora_bias", "use_dora"):
        if getattr(peft_config, name, False):
            raise ConfigError(
                f"lora.adapter_path: {path!r} has {name}=true, allowed: false; merge it into its "
                "base with peft and start from that model"
            )


def adapter_tensors(model: Any) -> dict[str, Tensor]:
    """Adapter parameters, a scalar head among them, under the names of adapter files."""
    return {
        _PREFIX + name.replace(f".{ADAPTER}", ""): parameter.detach()
        for name, parameter in _trained(model).items()
    }


@contextmanager
def adapters_disabled(model: Any) -> Iterator[None]:
    """The base model without its adapters."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def head_tensors(model: Any) -> dict[str, Tensor]:
    """The scalar head alone, under the names of adapter files; empty for a language model."""
    return {_PREFIX + name: p.detach() for name, p in head_parameters(model).items()}


@contextmanager
def adapter_replaced(model: Any, tensors: dict[str, Tensor]) -> Iterator[None]:
    """The model with the adapter values ``tensors`` in place of its own; others stay."""
    own = adapter_tensors(model)
    current = {name: own[name] for name in tensors}
    kept = {name: tensor.clone() for name, tensor in current.items()}
    _copy(current, tensors)
    try:
        yield
    finally:
        _copy(current, kept)


def merged_weight(
    module: BaseTunerLayer, weight: Tensor, full_tensor: Callable[[Tensor], Tensor]
) -> Tensor:
    """A new tensor: the whole base ``weight`` plus delta, added in fp32 and rounded once.

    ``full_tensor`` makes whole tensors of the adapter's parameters.
    """
    whole = {
        f"layer.{name}": full_tensor(parameter.detach())
        for name, parameter in module.named_parameters()
        if name.startswith("lora_")
    }
    delta = torch.func.functional_call(_Delta(module), whole, ())
    return (weight.float() + delta.float()).to(weight.dtype)


class _Delta(nn.Module):
    """The product of an adapter's parameters as a module, so that these can be substituted."""

    def __init__(self, layer: BaseTunerLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self) -> Tensor:
        delta: Tensor = self.layer.get_delta_weight(ADAPTER)
        return delta


def save_adapter(tensors: Mapping[str, Tensor], peft_config: Any, path: Path) -> None:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors`` as peft does."""
    path.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        path / _FILE,
        metadata={"format": "pt"},
    )
    peft_config.save_pretrained(str(path))


def read_adapter(model: Any, path: str, *, with_head: bool = True) -> dict[str, Tensor]:
    """The tensors of an adapter file, if they fit the adapter of ``model``; its head is not looked
    for without ``with_head``.

    Raises:
        ConfigError: there is no safetensors file.
        DataError: names or shapes differ; all of them are listed.
    """
    file = Path(path) / _FILE
    if not file.is_file():
        raise ConfigError(f"adapter {path!r} has no {_FILE} (other formats are not read)")
    found, own = load_file(file), adapter_tensors(model)
    if not with_head:
        head = head_tensors(model)
        own = {name: tensor for name, tensor in own.items() if name not in head}
    problems = [f"{name} is missing" for name in sorted(own.keys() - found.keys())]
    problems += [f"{name} is unexpected" for name in sorted(found.keys() - own.keys())]
    problems += [
        f"{name} has shape {list(found[name].shape)}, expected {list(own[name].shape)}"
        for name in sorted(own.keys() & found.keys())
        if own[name].shape != found[name].shape
    ]
    if problems:
        raise DataError(f"adapter {path!r} does not fit the model: {'; '.join(problems)}")
    return found


def _copy(into: dict[str, Tensor], source: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in into.items():
            tensor.copy_(source[name])


def _trained(model: Any) -> dict[str, torch.nn.Parameter]:
    """What trains beside a frozen base: the low-rank matrices and a scalar head."""
    head = head_parameters(model)
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if ".lora_" in name or name in head
    }
