"""From a model directory to a whole model that can be trained, on one device.

How it is divided over ranks afterwards is the backend's.
"""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tandem.config.schema import LoraConfig, TrainConfig
from tandem.errors import CapabilityError
from tandem.models.heads import load_model
from tandem.models.processor import bf16_products
from tandem.train import registry
from tandem.train.forward import check_exactness, check_head
from tandem.train.lora import inject_adapter
from tandem.train.offload import own_storage

log = logging.getLogger(__name__)


def check_device(device: torch.device) -> None:
    """Raise unless the engines of this package can train on ``device`` here."""
    if device.type not in ("cpu", "cuda"):
        raise CapabilityError(f"train.device: got {device.type!r}, allowed: cpu, cuda")
    registry.check_device(str(device))


def model_bytes(path: str) -> int:
    """Size of a model's files."""
    return sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))


def build_model(
    model_type: str,
    path: str,
    config: TrainConfig,
    lora: LoraConfig | None,
    *,
    seed: int,
    device: torch.device,
) -> tuple[Any, Any]:
    """The model, its adapter injected, and the adapter's peft configuration.

    Trainable parameters are fp32; a frozen base under an adapter is in the compute dtype.

    Raises:
        ConfigError, DataError: the directory or the adapter cannot be used.
        CapabilityError: the architecture cannot be trained with packing.
    """
    if config.dtype == "bfloat16" and device.type == "cpu" and bf16_products() == "emulated":
        _warn_of_emulation()
    is_half = config.dtype == "bfloat16" and lora is not None
    dtype = torch.bfloat16 if is_half else torch.float32
    model: Any = load_model(model_type, path, dtype=dtype, device=device, seed=seed)
    own_storage([*model.parameters(), *model.buffers()])
    model.requires_grad_(True)
    _switch_off_dropout(model)
    check_head(model)
    check_exactness(model, device)
    peft_config = None
    if lora is not None:
        peft_config = inject_adapter(model, lora, seed=seed)
        check_head(model)
    return model, peft_config


@cache
def _warn_of_emulation() -> None:
    """Once a process."""
    log.warning(
        "dtype: bfloat16 is emulated by this processor, many times more slowly than float32; "
        "choose float32 where a model is trained"
    )


def enable_checkpointing(model: Any, config: TrainConfig) -> None:
    """Recompute activations in the backward pass, if the configuration says so."""
    if config.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})


def _switch_off_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
