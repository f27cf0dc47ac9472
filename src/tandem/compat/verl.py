"""verl's engine contract over our TrainEngine: ``BaseEngine``, ``BaseEngineCtx``, its registry.

Needs no verl. How a verl batch becomes ours is in ``verl_batch``; what its release 0.9 asks beyond
this contract is in ``verl_0_9``.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, TypeVar

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from tandem.compat.verl_batch import VerlBatch, collect
from tandem.errors import ConfigError, DataError
from tandem.train import EngineRegistry as TrainEngineRegistry
from tandem.train import TrainEngine
from tandem.train.registry import DEVICES, MODEL_TYPES, detect_device
from tandem.types import FinetuneSpec

View = TypeVar("View", bound="type[BaseEngine]")
Mode = Literal["train", "eval"]


class BaseEngine:
    """One of our train engines, used as verl uses its own.

    Batches are verl's: jagged without padding, or padded, with settings such as ``temperature``,
    ``micro_batch_size_per_gpu``, ``use_dynamic_bsz`` and ``calculate_entropy`` as non-tensor
    entries. They are not changed. Losses are verl's, ``loss_function(model_output=, data=,
    dp_group=) -> (loss, metrics)``, normalised by ``batch_num_tokens`` or ``global_batch_size`` and
    multiplied by ``dp_size`` as if gradients were averaged over ranks.
    """

    def __init__(self, engine: TrainEngine, *, ft_spec: FinetuneSpec | None = None) -> None:
        self.engine = engine
        self._ft_spec = ft_spec
        self._saved: list[Path] = []

    def initialize(self) -> None:
        self.engine.initialize(ft_spec=self._ft_spec)

    # --- modes and placement ------------------------------------------------------------------

    @property
    def mode(self) -> str | None:
        return self.engine.mode

    @mode.setter
    def mode(self, mode: str | None) -> None:
        self.engine.mode = mode

    @property
    def is_param_offload_enabled(self) -> bool:
        return self.engine.is_param_offload_enabled

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return self.engine.is_optimizer_offload_enabled

    def train_mode(self, **kwargs: Any) -> BaseEngineCtx:
        """``disable_auto_offload`` (False) and ``zero_grad_on_exit`` (True) are known."""
        return BaseEngineCtx(self, "train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> BaseEngineCtx:
        return BaseEngineCtx(self, "eval", **kwargs)

    def to(
        self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """``device`` or the device's own name brings parts back, ``cpu`` or ``host`` frees them."""
        self.engine.to(device, model=model, optimizer=optimizer, grad=grad)

    # --- training -----------------------------------------------------------------------------

    def optimizer_zero_grad(self) -> None:
        self.engine.optimizer_zero_grad()

    def optimizer_step(self) -> float:
        """The gradient norm before clipping."""
        return self.engine.optimizer_step()

    def lr_scheduler_step(self) -> float:
        """The learning rate of the next step."""
        return self.engine.lr_scheduler_step()

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """``model_output`` (jagged or padded as ``data``), ``loss`` and ``metrics``.

        The last two have one entry a micro-batch. ``model_output`` is filled when ``forward_only``
        or when ``data`` asks by ``return_model_output``.
        """
        if loss_function is None and not forward_only:
            raise DataError("loss_function: got None, allowed only with forward_only")
        group = self.get_data_parallel_group()
        batch = VerlBatch(data, self.engine.output_names, self._sum_over_ranks, self._agree_max)
        batch.data.set_non_tensor("dp_size", self.get_data_parallel_size())
        keep = forward_only or bool(batch.setting("return_model_output", False))
        results = []
        for rows in batch.microbatches():
            part = batch.select(rows)
            if loss_function is None:
                found = self.engine.forward(part, outputs=batch.outputs)
                results.append((rows, dict(found.items())))
                continue
            loss = batch.loss(loss_function, group)
            done = self.engine.forward_backward_batch(
                part, loss, forward_only=forward_only, return_outputs=keep
            )
            results.append((rows, done.outputs))
        return collect(batch, results if keep else [])

    def train_batch(self, data: TensorDict, loss_function: Callable[..., Any]) -> dict[str, Any]:
        """Zero, forward and backward, one step; ``metrics`` has ``grad_norm`` too."""
        self.optimizer_zero_grad()
        outputs = self.forward_backward_batch(data, loss_function)
        outputs["metrics"]["grad_norm"] = self.optimizer_step()
        return outputs

    def infer_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None = None
    ) -> dict[str, Any]:
        return self.forward_backward_batch(data, loss_function, forward_only=True)

    # --- weights and files --------------------------------------------------------------------

    def get_per_tensor_param(
        self,
    ) -> tuple[Generator[tuple[str, Tensor], None, None], dict[str, Any] | None]:
        """Full tensors by their names on disk, adapters merged, so that there is no second part."""
        stream, _ = self.engine.get_per_tensor_param()
        return (item for item in stream), None

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Write ``local_path``; beyond ``max_ckpt_to_keep`` the oldest that we wrote is deleted.

        ``hdfs_path`` is an fsspec URL.
        """
        _refuse("save_checkpoint", kwargs)
        self.engine.save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)
        self._saved = [path for path in self._saved if path != Path(local_path)]
        self._saved.append(Path(local_path))
        while max_ckpt_to_keep is not None and len(self._saved) > max(1, max_ckpt_to_keep):
            oldest = self._saved.pop(0)
            is_first = self.get_data_parallel_rank() == 0 and self.is_mp_src_rank_with_outputs()
            if is_first and oldest.exists():
                shutil.rmtree(oldest)

    def load_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        del_local_after_load: bool = True,
        **kwargs: Any,
    ) -> None:
        """Read what ``save_checkpoint`` wrote; only a download from ``hdfs_path`` is deleted."""
        _refuse("load_checkpoint", kwargs)
        self.engine.load_checkpoint(local_path, hdfs_path, del_local_after_load)

    # --- topology and adapters ----------------------------------------------------------------

    def get_data_parallel_size(self) -> int:
        return self.engine.get_data_parallel_size()

    def get_data_parallel_rank(self) -> int:
        return self.engine.get_data_parallel_rank()

    def get_data_parallel_group(self) -> Any:
        """The process group, None with one rank."""
        return self.engine.get_data_parallel_group()

    def is_mp_src_rank_with_outputs(self) -> bool:
        return self.engine.is_mp_src_rank_with_outputs()

    def disable_adapter(self) -> AbstractContextManager[None]:
        """The base model; without an adapter nothing changes."""
        return self.engine.disable_adapter(missing_ok=True)

    def _sum_over_ranks(self, value: float) -> float:
        return self._reduce(value, dist.ReduceOp.SUM)

    def _agree_max(self, value: int) -> int:
        return int(self._reduce(value, dist.ReduceOp.MAX))

    def _reduce(self, value: float, operation: Any) -> float:
        group = self.get_data_parallel_group()
        if group is None:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=self.engine.device)
        dist.all_reduce(tensor, op=operation, group=group)
        return float(tensor)


class BaseEngineCtx:
    """Sets the mode, brings back what is offloaded, and on exit offloads it again."""

    def __init__(self, engine: BaseEngine, mode: Mode, **kwargs: Any) -> None:
        if mode not in ("train", "eval"):
            raise ConfigError(f"mode: got {mode!r}, allowed: train, eval")
        self.engine = engine
        self.mode: Mode = mode
        self.disable_auto_offload = bool(kwargs.pop("disable_auto_offload", False))
        self.zero_grad_on_exit = bool(kwargs.pop("zero_grad_on_exit", mode == "train"))
        _refuse(f"{mode}_mode", kwargs)

    def _context_switch(self, device: str) -> None:
        """Move what is offloaded by configuration: the model, in training the rest as well."""
        if self.disable_auto_offload:
            return
        is_training = self.mode == "train"
        self.engine.to(
            device,
            model=self.engine.is_param_offload_enabled,
            optimizer=is_training and self.engine.is_optimizer_offload_enabled,
            grad=is_training and self.engine.engine.is_grad_offload_enabled,
        )

    def __enter__(self) -> BaseEngine:
        self._context_switch("device")
        self.engine.mode = self.mode
        self.engine.engine.train(self.mode == "train")
        return self.engine

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        try:
            if self.zero_grad_on_exit or (self.mode == "train" and exc_type is not None):
                self.engine.optimizer_zero_grad()
        finally:
            self.engine.mode = None
            self._context_switch("host")


class EngineRegistry:
    """verl's registry. It finds our engines by model type and backend, and what is registered here.

    The classes it returns take the arguments of our engines, plus ``ft_spec``.
    """

    _registered: ClassVar[dict[tuple[str, str, str], type[BaseEngine]]] = {}

    @classmethod
    def register(
        cls, model_type: str, backend: list[str] | str, device: list[str] | str = "cuda"
    ) -> Callable[[View], View]:
        """Class decorator for a subclass of ``BaseEngine``; backend and device may be lists.

        Raises:
            ConfigError: the key is taken, or one of its parts is unknown.
        """
        backends = [backend] if isinstance(backend, str) else list(backend)
        devices = [device] if isinstance(device, str) else list(device)
        _check_choice("model_type", [model_type], MODEL_TYPES)
        _check_choice("device", devices, DEVICES)
        keys = [(model_type, name, kind) for name in backends for kind in devices]

        def decorate(view: View) -> View:
            if not (isinstance(view, type) and issubclass(view, BaseEngine)):
                raise ConfigError(f"register: got {view!r}, allowed: a subclass of BaseEngine")
            if taken := [key for key in keys if key in cls._registered]:
                raise ConfigError(f"engine {' '.join(taken[0])!r} is registered already")
            cls._registered.update(dict.fromkeys(keys, view))
            return view

        return decorate

    @classmethod
    def get_engine_cls(cls, model_type: str, backend: str) -> type[BaseEngine]:
        """The view for the device that is there (cuda, npu, else cpu).

        Raises:
            ConfigError: no such engine; the message lists what exists.
        """
        return cls._find(model_type, backend, None)

    @classmethod
    def new(cls, model_type: str, backend: str, *args: Any, **kwargs: Any) -> BaseEngine:
        """Construct an engine; the device is ``kwargs["config"].device``, else detected."""
        config = kwargs.get("config", args[0] if args else None)
        view = cls._find(model_type, backend, getattr(config, "device", None))
        return view(*args, **kwargs)

    @classmethod
    def _find(cls, model_type: str, backend: str, device: str | None) -> type[BaseEngine]:
        kind = detect_device() if device is None else device.split(":")[0]
        found = cls._registered.get((model_type, backend, kind))
        return found or view_of(TrainEngineRegistry.get_engine_cls(model_type, backend, kind))


@functools.cache
def view_of(engine_cls: type[TrainEngine]) -> type[BaseEngine]:
    """A view class that constructs ``engine_cls`` from its own arguments."""

    def construct(
        self: BaseEngine, *args: Any, ft_spec: FinetuneSpec | None = None, **kwargs: Any
    ) -> None:
        BaseEngine.__init__(self, engine_cls(*args, **kwargs), ft_spec=ft_spec)

    return type(f"Verl{engine_cls.__name__}", (BaseEngine,), {"__init__": construct})


def _check_choice(field: str, values: Sequence[str], allowed: Sequence[str]) -> None:
    for value in values:
        if value not in allowed:
            raise ConfigError(f"{field}: got {value!r}, allowed: {', '.join(allowed)}")


def _refuse(method: str, kwargs: dict[str, Any]) -> None:
    if kwargs:
        raise ConfigError(f"{method}: unknown argument {sorted(kwargs)[0]!r}; leave it out")
