"""The train engine for one device, CPU or CUDA: only the primitives."""

from __future__ import annotations

import gc
from typing import Any, ClassVar

import torch
from torch import Tensor

from tandem.errors import ConfigError
from tandem.train.building import build_model, check_device, enable_checkpointing, model_bytes
from tandem.train.engine import TrainEngine
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
        size = model_bytes(self.model_path)
        return Scheduling(cpu=1, gpu=int(self.device.type != "cpu"), mem=2048 + size * 8 // 2**20)

    # --- primitives ---------------------------------------------------------------------------

    def _build(self, addr: str | None) -> Any:
        if addr is not None:
            raise ConfigError(f"addr: got {addr!r}, allowed: None; a local engine joins no group")
        device = self.device
        check_device(device)
        model, self.peft_config = build_model(
            self.model_type,
            self.model_path,
            self.config,
            self.lora,
            seed=self.seed,
            device=device,
        )
        enable_checkpointing(model, self.config)
        return model

    def _build_optimizer(self) -> torch.optim.Optimizer:
        return build_optimizer(self.parameters(), self.config)

    def _release(self) -> None:
        self._model = self._optimizer = None
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def _backward(self, loss: Tensor, *, is_last: bool) -> None:
        loss.backward()

    def _grad_norm(self) -> float:
        return float(squared_norm(gradients(self.parameters().values())).sqrt())

    def _apply_gradients(self, norm: float) -> None:
        grads = gradients(self.parameters().values())
        scale_gradients(grads, norm, self.config.max_grad_norm)
        self.optimizer.step()

    def _full_tensor(self, tensor: Tensor) -> Tensor:
        return tensor

    def _copy_full(self, into: Tensor, full: Tensor | None) -> None:
        assert full is not None
        with torch.no_grad():
            into.copy_(full)


class LocalValueEngine(LocalTrainEngine):
    """The same with a scalar head: the value of every state."""

    model_type = "value_model"


class LocalRewardEngine(LocalTrainEngine):
    """The same with a scalar head: the score of every row."""

    model_type = "reward_model"
