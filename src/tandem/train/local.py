"""The train engine for one device, CPU or CUDA: only the primitives."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tandem.errors import CapabilityError, ConfigError
from tandem.models.heads import load_model
from tandem.train.engine import TrainEngine
from tandem.train.forward import check_exactness, check_head
from tandem.train.lora import inject_adapter
from tandem.train.offload import own_storage
from tandem.train.optim import build_optimizer, gradients, scale_gradients, squared_norm
from tandem.types import Scheduling


class LocalTrainEngine(TrainEngine):
    """Trains a Hugging Face model on one device.

    Trainable parameters, gradients and optimizer state are fp32; ``dtype=bfloat16`` computes under
    autocast. A frozen base under an adapter is held in the compute dtype. Dropout of the model's
    configuration is switched off (on-policy ratios would differ from 1); that of the adapter is
    used as configured.
    """

    capabilities: ClassVar[frozenset[str]] = frozenset(
        {
            "bfloat16",
            "gradient_checkpointing",
            "language_model",
            "lora",
            "offload",
            "reward_model",
            "value_model",
        }
    )

    @property
    def device(self) -> torch.device:
        name = self.config.device or ("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(name)

    # --- topology -----------------------------------------------------------------------------

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_size(self) -> int:
        return 1

    def get_data_parallel_group(self) -> None:
        return None

    @property
    def parallelism_group(self) -> None:
        return None

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def get_scheduling_config(self) -> Scheduling:
        """One core, the device, and memory for fp32 weights, gradients and two moments.

        Estimated from the size of the model's files, taken to be bf16; needs no ``initialize``.
        """
        files = Path(self.model_path).glob("*.safetensors")
        size = sum(file.stat().st_size for file in files)
        return Scheduling(cpu=1, gpu=int(self.device.type != "cpu"), mem=2048 + size * 8 // 2**20)

    # --- primitives ---------------------------------------------------------------------------

    def _build(self, addr: str | None) -> Any:
        if addr is not None:
            raise ConfigError(f"addr: got {addr!r}, allowed: None; a local engine joins no group")
        device = self.device
        if device.type not in ("cpu", "cuda"):
            raise CapabilityError(f"train.device: got {device.type!r}, allowed: cpu, cuda")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError("train.device: got 'cuda', but there is no CUDA device")
        is_half = self.config.dtype == "bfloat16" and self.lora is not None
        dtype = torch.bfloat16 if is_half else torch.float32
        model: Any = load_model(
            self.model_type, self.model_path, dtype=dtype, device=device, seed=self.seed
        )
        own_storage([*model.parameters(), *model.buffers()])
        model.requires_grad_(True)
        _switch_off_dropout(model)
        check_head(model)
        check_exactness(model, device)
        if self.lora is not None:
            self.peft_config = inject_adapter(model, self.lora, seed=self.seed)
            check_head(model)
        if self.config.gradient_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        return model

    def _build_optimizer(self) -> torch.optim.Optimizer:
        return build_optimizer(self.parameters(), self.config)

    def _release(self) -> None:
        self._model = self._optimizer = None
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def _backward(self, loss: Tensor) -> None:
        if loss.requires_grad:
            loss.backward()

    def _grad_norm(self) -> float:
        return float(squared_norm(gradients(self.parameters().values())).sqrt())

    def _apply_gradients(self, norm: float) -> None:
        grads = gradients(self.parameters().values())
        scale_gradients(grads, norm, self.config.max_grad_norm)
        self.optimizer.step()

    def _full_tensor(self, tensor: Tensor) -> Tensor:
        return tensor

    def _copy_full(self, into: Tensor, full: Tensor) -> None:
        with torch.no_grad():
            into.copy_(full)

    def _sum_over_ranks(self, value: float) -> float:
        return value

    def _gather_over_ranks(self, value: Any) -> list[Any]:
        return [value]

    def _agree_max(self, value: int) -> int:
        return value


class LocalValueEngine(LocalTrainEngine):
    """The same with a scalar head: the value of every state."""

    model_type = "value_model"


class LocalRewardEngine(LocalTrainEngine):
    """The same with a scalar head: the score of every row."""

    model_type = "reward_model"


def _switch_off_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
