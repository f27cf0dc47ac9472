"""Our engines inside verl 0.9: ``register()`` puts them into its own registry.

verl must be installed. Translating its configuration, and the members that this release added to
the contract in ``verl``, belong here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor
from verl.utils.device import get_device_name
from verl.workers.engine.base import BaseEngine as VerlBaseEngine
from verl.workers.engine.base import EngineRegistry as VerlRegistry
from verl.workers.engine.spec import ShardSpec
from verl.workers.engine.utils import _hf_entry_identity, hf_delta_export

from tandem.compat.verl import BaseEngine
from tandem.config.schema import LoraConfig, TrainConfig
from tandem.errors import ConfigError
from tandem.train import EngineRegistry
from tandem.types import FinetuneSpec

MODEL_TYPES = ("language_model", "value_model")

UNBOUNDED_TOKENS = 1 << 40
"""The cap of a micro-batch where verl counts rows: its own cut decides."""


class TandemEngine(BaseEngine, VerlBaseEngine):
    """A train engine of ours, made from verl's four configurations.

    Raises:
        ConfigError: something is asked for that our engine would not do.
    """

    backend: ClassVar[str] = "local"
    model_type: ClassVar[str] = "language_model"

    def __init__(
        self,
        model_config: Any,
        engine_config: Any,
        optimizer_config: Any = None,
        checkpoint_config: Any = None,
    ) -> None:
        _refuse_unsupported(model_config, engine_config, optimizer_config)
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        engine = EngineRegistry.new(
            self.model_type,
            self.backend,
            config=train_config(model_config, engine_config, optimizer_config, self.backend),
            model_path=model_config.local_path,
            lora=_lora(model_config),
            seed=engine_config.seed,
        )
        world = dist.get_world_size() if dist.is_initialized() else 1
        if self.backend == "local" and world > 1:
            raise ConfigError(f"engine.strategy: {world} ranks, allowed with the local backend: 1")
        steps = getattr(optimizer_config, "total_training_steps", -1)
        super().__init__(engine, ft_spec=FinetuneSpec(1, steps, 1) if steps > 0 else None)
        self._delta_shard_snap: dict[str, Tensor] = {}
        if self.backend != "local":
            # verl asks for the topology before it initialises, which only the ranks together know.
            self.initialize()

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **kwargs: Any
    ) -> tuple[Generator[tuple[str, Tensor], None, None], dict[str, Any] | None]:
        """Full tensors with adapters merged, whatever was sent before: the arguments are hints."""
        return super().get_per_tensor_param()

    def get_per_tensor_param_shard(
        self, **kwargs: Any
    ) -> tuple[Generator[tuple[str, Tensor, Any], None, None], None]:
        """The same tensors flat, each as the one whole shard of itself."""
        stream, _ = super().get_per_tensor_param()
        return (
            (name, tensor.reshape(-1), ShardSpec(tuple(tensor.shape))) for name, tensor in stream
        ), None

    def get_per_tensor_param_delta_shard(self, **kwargs: Any) -> tuple[Any, None]:
        """What changed since the last call, or since ``prime_delta_snapshots``."""
        shards, _ = self.get_per_tensor_param_shard()
        return hf_delta_export(shards, self._delta_shard_snap, _hf_entry_identity), None


def register(strategy: str = "tandem", backend: str = "local") -> None:
    """Make ``backend`` of our registry known to verl as ``engine.strategy``.

    For language and value models, on every device. A second call with the same name replaces.
    """
    devices = ["cuda", "npu", "cpu"]
    for model_type in MODEL_TYPES:
        name = f"Tandem{backend.title()}{model_type.title().replace('_', '')}"
        members = {"backend": backend, "model_type": model_type}
        decorate: Callable[[type], type] = VerlRegistry.register(model_type, strategy, devices)
        decorate(type(name, (TandemEngine,), members))


def train_config(
    model_config: Any, engine_config: Any, optimizer_config: Any, backend: str
) -> TrainConfig:
    """Our configuration of what verl's say."""
    caps = [
        getattr(engine_config, name, None)
        for name in ("max_token_len_per_gpu", "infer_max_token_len_per_gpu")
    ]
    values: dict[str, Any] = {
        "backend": backend,
        "device": get_device_name(),
        "dtype": engine_config.dtype,
        "max_tokens_per_microbatch": max(filter(None, caps), default=UNBOUNDED_TOKENS),
        "gradient_checkpointing": model_config.enable_gradient_checkpointing,
        "offload_params": engine_config.param_offload,
        "offload_grads": engine_config.param_offload,
        "offload_optimizer": engine_config.optimizer_offload,
    }
    if optimizer_config is not None:
        values |= _optimizer(optimizer_config)
    return TrainConfig(**values)


def _optimizer(config: Any) -> dict[str, Any]:
    total = config.total_training_steps
    warmup = config.lr_warmup_steps
    if warmup is None or warmup <= 0:
        warmup = int(config.lr_warmup_steps_ratio * max(total, 0))
    return {
        "lr": config.lr,
        "betas": tuple(config.betas),
        "weight_decay": config.weight_decay,
        "max_grad_norm": config.clip_grad,
        "schedule": getattr(config, "lr_scheduler_type", "constant"),
        "warmup_steps": warmup,
        "min_lr_ratio": getattr(config, "min_lr_ratio", None) or 0.0,
    }


def _lora(model_config: Any) -> LoraConfig | None:
    if model_config.lora_rank <= 0 and model_config.lora_adapter_path is None:
        return None
    return LoraConfig(
        rank=max(1, model_config.lora_rank),
        alpha=model_config.lora_alpha,
        target_modules=model_config.target_modules,
        adapter_path=model_config.lora_adapter_path,
    )


def _refuse_unsupported(model: Any, engine: Any, optimizer: Any) -> None:
    """Name every setting that would change the numbers and that we have no match for."""
    asked = {
        "model.exclude_modules": model.exclude_modules,
        "model.target_parameters": model.target_parameters,
        "model.use_liger": model.use_liger,
        "model.mtp.enable": model.mtp.enable,
        "engine.router_replay": engine.router_replay.mode != "disabled",
        "engine.ulysses_sequence_parallel_size": (
            getattr(engine, "ulysses_sequence_parallel_size", 1) > 1
        ),
        "engine.qat.enable": getattr(getattr(engine, "qat", None), "enable", False),
        "optim.optimizer": getattr(optimizer, "optimizer", "AdamW") != "AdamW",
        "optim.override_optimizer_config": getattr(optimizer, "override_optimizer_config", None),
        "optim.num_cycles": getattr(optimizer, "num_cycles", 0.5) != 0.5,
    }
    if found := [name for name, is_asked in asked.items() if is_asked]:
        raise ConfigError(f"{', '.join(found)}: not supported by tandem's engine; leave it out")
