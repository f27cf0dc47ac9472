"""The TrainEngine contract, one class in sections; a backend implements the primitives at its end.

Longer than other files because the contract is one class that reads top to bottom. The step loop
is in ``step``, the forward pass in ``forward``, the optimizer in ``optim``, weights on their way
out in ``export`` and ``directory``, training state in ``state``. Losses are passed in.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn

from tandem.config.schema import LoraConfig, TrainConfig
from tandem.data.packing import PackedRows
from tandem.errors import (
    CapabilityError,
    ConfigError,
    DataError,
    EngineError,
    TrainingDiverged,
)
from tandem.train import lora as adapters
from tandem.train.directory import load_directory, save_directory
from tandem.train.export import full_tensors, param_specs, spec_of
from tandem.train.forward import OUTPUTS, score
from tandem.train.identity import describe
from tandem.train.optim import learning_rate, optimizer_tensors, set_learning_rate
from tandem.train.placement import Part, Placement
from tandem.train.ranks import meet, on_first_rank
from tandem.train.shards import local_part
from tandem.train.state import load_checkpoint, save_checkpoint
from tandem.train.step import (
    LossWeightFn,
    StepResult,
    required_outputs,
    run_hook,
    run_microbatches,
)
from tandem.types import (
    BatchOutput,
    FinetuneSpec,
    LossFn,
    ParamSpec,
    SaveLoadMeta,
    Scheduling,
    WeightUpdateMeta,
)
from tandem.weights import publish

ParamStream = Iterator[tuple[str, Tensor]]


class TrainEngine(ABC):
    """Learns: forward, backward, step, and everything that belongs to the state of learning.

    All ranks call every method with their own data-parallel shard. The losses of all micro-batches
    and ranks are summed, so their normalisation is in the batch's weight keys. A caller's batch is
    never changed; outputs come back in its row order and layout.
    """

    capabilities: ClassVar[frozenset[str]] = frozenset()
    model_type: ClassVar[str] = "language_model"
    """What the model predicts: tokens, values of states, or scores of whole rows."""
    spans_ranks: ClassVar[bool] = False
    """Whether the ranks that a launcher started share one model."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        model_path: str,
        lora: LoraConfig | None = None,
        seed: int = 0,
        tokenizer_path: str | None = None,
    ) -> None:
        """Check that this backend can do what is asked; nothing is loaded yet.

        ``tokenizer_path`` is where the tokenizer lies whose digest checkpoints carry, unless it is
        the one beside the model.

        Raises:
            CapabilityError: it cannot.
        """
        needed = {self.model_type, *_needed_capabilities(config, lora)}
        missing = sorted(needed - self.capabilities)
        if missing:
            raise CapabilityError(
                f"{type(self).__name__} lacks {', '.join(missing)}; "
                f"it has {', '.join(sorted(self.capabilities))}"
            )
        self.config, self.lora, self.seed, self.model_path = config, lora, seed, model_path
        self.tokenizer_path = tokenizer_path
        self.mode: str | None = None
        self.skipped_steps = 0
        self._skipped_in_row = 0
        self._schedule_step = 0
        self._version = 0
        self._total_steps: int | None = None
        self._has_weight: bool | None = None
        self._last_update = 0.0
        self._model: Any = None
        self._optimizer: torch.optim.Optimizer | None = None
        self.peft_config: Any = None
        self._starting_adapter: dict[str, Tensor] | None = None
        self._starting_head: dict[str, Tensor] = {}
        self._placement = Placement(self._tensors_of)

    # --- life cycle ---------------------------------------------------------------------------

    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Load the model, make the optimizer; ``ft_spec`` gives the schedule its end. Idempotent.

        Raises:
            ConfigError: the schedule needs an end and there is no ``ft_spec``.
            CapabilityError: the architecture cannot be trained with packing.
        """
        if self._model is not None:
            return
        self._total_steps = None if ft_spec is None else ft_spec.total_train_steps
        learning_rate(self.config.warmup_steps, self.config, self._total_steps)
        self._model = self._build(addr)
        self._optimizer = self._build_optimizer()
        if self.lora is not None:
            head = adapters.head_tensors(self._model)
            self._starting_head = {name: tensor.clone() for name, tensor in head.items()}
        if self.lora is not None and self.lora.adapter_path is not None:
            tensors = adapters.adapter_tensors(self._model)
            self._starting_adapter = {name: tensor.clone() for name, tensor in tensors.items()}
        self._model.train()
        self._offload_configured()

    def destroy(self) -> None:
        """Release the model, the optimizer and whatever the backend holds. Idempotent."""
        if self._model is not None:
            self._release()
        self._model = self._optimizer = self._starting_adapter = None
        self._starting_head = {}
        self._placement = Placement(self._tensors_of)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What makes a checkpoint one of this engine, as plain JSON; made once."""
        return describe(self)

    @property
    def model(self) -> Any:
        if self._model is None:
            raise EngineError(f"{type(self).__name__}: call initialize() first")
        return self._model

    @property
    def output_names(self) -> tuple[str, ...]:
        """What ``forward`` gives and a loss may require of this model type."""
        return OUTPUTS[self.model_type]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        if self._optimizer is None:
            raise EngineError(f"{type(self).__name__}: call initialize() first")
        return self._optimizer

    # --- modes and placement ------------------------------------------------------------------

    @property
    def is_param_offload_enabled(self) -> bool:
        return self.config.offload_params

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return self.config.offload_optimizer

    @property
    def is_grad_offload_enabled(self) -> bool:
        return self.config.offload_grads

    @contextmanager
    def train_mode(
        self, *, disable_auto_offload: bool = False, zero_grad_on_exit: bool = False
    ) -> Iterator[TrainEngine]:
        """Everything on the device and ``mode = "train"``; offloaded again on exit."""
        with self._mode("train", ("model", "optimizer", "grad"), disable_auto_offload):
            try:
                yield self
            finally:
                if zero_grad_on_exit:
                    self.optimizer_zero_grad()

    @contextmanager
    def eval_mode(
        self, *, disable_auto_offload: bool = False, zero_grad_on_exit: bool = False
    ) -> Iterator[TrainEngine]:
        """The model on the device and ``mode = "eval"``; offloaded again on exit."""
        with self._mode("eval", ("model",), disable_auto_offload):
            try:
                yield self
            finally:
                if zero_grad_on_exit:
                    self.optimizer_zero_grad()

    def train(self, mode: bool = True) -> TrainEngine:
        """Set training (dropout, checkpointing) or evaluation mode; moves nothing."""
        self.model.train(mode)
        return self

    def eval(self) -> TrainEngine:
        return self.train(False)

    def to(
        self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Place parts by hand: ``host`` frees their device memory, ``device`` brings them back.

        The device's own name (``cuda``, ``cuda:0``, …) means ``device``; ``cpu`` means ``host`` on
        an accelerator.
        """
        wanted: dict[Part, bool] = {"model": model, "optimizer": optimizer, "grad": grad}
        here = {"device", self.device.type, str(self.device)}
        if device not in here | {"host", "cpu"}:
            raise ConfigError(
                f"device: got {device!r}, allowed: host, cpu, {', '.join(sorted(here))}"
            )
        parts = [part for part, is_wanted in wanted.items() if is_wanted]
        if device in here:
            self._placement.restore(*parts)
        else:
            self._placement.offload(*parts)

    # --- training -----------------------------------------------------------------------------

    def forward_backward_batch(
        self,
        data: TensorDict,
        loss_fn: LossFn | None,
        loss_weight_fn: LossWeightFn | None = None,
        forward_only: bool = False,
        *,
        return_outputs: bool | None = None,
    ) -> BatchOutput:
        """Run the batch in micro-batches; gradients accumulate unless ``forward_only``.

        Outputs are returned when ``return_outputs`` (None: when ``forward_only``). Without a
        ``loss_weight_fn`` the losses are summed and the batch must have a weight key; with it each
        loss is a mean, combined as ``sum(w * loss) / sum(w)``. Attributes of ``loss_fn``:
        ``required_outputs`` (see ``LossFn``), and ``keep_together``, a per-row key whose equal
        values mark rows that must share a micro-batch (preference pairs).

        Raises:
            DataError: a bad batch, a row over the token cap, or no weights at all.
        """
        wanted = forward_only if return_outputs is None else return_outputs
        names: Collection[str] = ()
        if wanted:
            asked = required_outputs(loss_fn, self.output_names) - {"logits"}
            names = asked or self.output_names
        result = self._run(data, loss_fn, loss_weight_fn, not forward_only, names)
        return BatchOutput(result.outputs, result.loss, result.metrics)

    def optimizer_zero_grad(self) -> None:
        with self._placement.resident("grad"):
            for parameter in self.parameters().values():
                parameter.grad = None
        self._has_weight = None

    def optimizer_step(self) -> float:
        """Clip and step; returns the global gradient norm before clipping.

        A non-finite norm skips the step on all ranks, clears the gradients and is counted; the
        schedule is the caller's and still advances. Nothing to train on: no step, norm 0.

        Raises:
            TrainingDiverged: ``max_skipped_in_row`` steps in a row were skipped.
        """
        self._last_update = 0.0
        if self._has_weight is False:
            return 0.0
        with self._placement.resident("model", "optimizer", "grad"):
            norm = self._grad_norm()
            if not math.isfinite(norm):
                self._skip(norm)
                return norm
            set_learning_rate(self.optimizer, self.learning_rate)
            self._apply_gradients(norm)
        self._skipped_in_row = 0
        self._last_update = 1.0
        return norm

    def lr_scheduler_step(self) -> float:
        """Advance the schedule by one step; returns the learning rate of the next step."""
        self._schedule_step += 1
        return self.learning_rate

    def step_lr_scheduler(self) -> float:
        """The same under its AReaL name."""
        return self.lr_scheduler_step()

    @property
    def learning_rate(self) -> float:
        """Of the next optimizer step: a pure function of the schedule's step."""
        return learning_rate(self._schedule_step, self.config, self._total_steps)

    def train_batch(
        self, input_: TensorDict, loss_fn: LossFn, loss_weight_fn: LossWeightFn | None = None
    ) -> dict[str, float]:
        """Zero, forward and backward, one step; the schedule is advanced by the caller.

        Returns ``loss``, ``grad_norm`` (before clipping), ``lr`` (the one used),
        ``update_successful`` (0 or 1), ``num_rows``, ``num_tokens``, ``num_trained_tokens``,
        ``num_microbatches``, and the metrics of the loss under their names.
        """
        with self._placement.resident("model", "optimizer", "grad"):
            self.optimizer_zero_grad()
            result = self._run(input_, loss_fn, loss_weight_fn, True, ())
            lr = self.learning_rate
            norm = self.optimizer_step()
        return result.metrics | {
            "loss": result.loss,
            "grad_norm": norm,
            "lr": lr,
            "update_successful": self._last_update,
            "num_rows": float(result.num_rows),
            "num_tokens": float(result.num_tokens),
            "num_trained_tokens": float(result.num_trained_tokens),
            "num_microbatches": float(result.num_microbatches),
        }

    # --- scoring ------------------------------------------------------------------------------

    def eval_batch(
        self, input_: TensorDict, loss_fn: LossFn, loss_weight_fn: LossWeightFn | None = None
    ) -> float:
        """The loss as the step would have it, without gradients."""
        return self._run(input_, loss_fn, loss_weight_fn, False, ()).loss

    def infer_batch(self, data: TensorDict, loss_fn: LossFn | None = None) -> BatchOutput:
        """Per-token outputs, and with a ``loss_fn`` its loss and metrics, without gradients."""
        return self.forward_backward_batch(data, loss_fn, forward_only=True)

    def forward(
        self,
        input_: TensorDict,
        output_seqlens: Sequence[int] | None = None,
        post_hook: Callable[[Tensor, TensorDict], Any] | None = None,
        aggregate_fn: Callable[[list[Any]], Any] = torch.cat,
        *,
        outputs: Collection[str] | None = None,
        trained_only: bool = False,
    ) -> Any:
        """The ``outputs`` (None: ``output_names``) as a TensorDict ``[B]``, in eval mode.

        Per-token ones are ``[B, T]``; ``scores`` and ``bootstrap_values`` are ``[B]``.
        ``trained_only`` leaves 0 at tokens that no loss looks at (``loss_mask`` false, no weight),
        which saves their projection to the vocabulary.

        With ``post_hook(logits, microbatch)`` its result instead: ``logits [b, T, V]`` are divided
        by the temperature and, like every per-token tensor, index t speaks about token t (zeros
        where nothing is predicted). The hook returns one entry per row along dimension 0, or,
        with ``output_seqlens`` (one length per row of the batch), rows laid end to end.
        ``aggregate_fn`` gets the entries of all rows, in the order of the batch, as a list.
        """
        if post_hook is not None:
            with self._placement.resident("model"), self._model_mode(False):
                return aggregate_fn(run_hook(self, input_, post_hook, output_seqlens))
        names = self.output_names if outputs is None else outputs
        if unknown := set(names) - set(self.output_names):
            raise DataError(f"outputs: got {sorted(unknown)}, allowed: {list(self.output_names)}")
        result = self._run(input_, None, None, False, names, trained_only)
        return TensorDict(dict(result.outputs), batch_size=input_.batch_size)

    # --- adapters and the reference policy ----------------------------------------------------

    @contextmanager
    def disable_adapter(self, missing_ok: bool = False) -> Iterator[None]:
        """The base model without its adapter, a scalar head as it was when training started.

        For a language model that is the reference policy unless training started from a trained
        adapter; ``reference`` is right in both cases.
        """
        if self.lora is None and not missing_ok:
            raise EngineError("disable_adapter: there is no adapter; configure model.lora")
        with (
            self._placement.resident("model"),
            adapters.adapters_disabled(self.model),
            adapters.adapter_replaced(self.model, self._starting_head),
        ):
            yield

    @contextmanager
    def reference(self) -> Iterator[None]:
        """The policy that training started from: the base model, or the adapter it came with."""
        if self._starting_adapter is None:
            with self.disable_adapter():
                yield
            return
        with (
            self._placement.resident("model"),
            adapters.adapter_replaced(self.model, self._starting_adapter),
        ):
            yield

    # --- weights ------------------------------------------------------------------------------

    def get_param_specs(self, dtype: str | None = None) -> list[ParamSpec]:
        """Name on disk, full shape and dtype of what ``get_per_tensor_param`` yields, in order."""
        with self._placement.resident("model"):
            return param_specs(self.model, _torch_dtype(dtype))

    def get_per_tensor_param(
        self, dtype: str | None = None, *, adapter_only: bool = False
    ) -> tuple[ParamStream, dict[str, Any] | None]:
        """A lazy stream of (name on disk, full tensor) and, for an adapter, its configuration.

        Tied weights come once, adapters are merged into copies. All ranks must drain the stream.
        It works in every state of offload and leaves it as it was.
        """
        if adapter_only:
            if self.lora is None:
                raise EngineError("adapter_only: there is no adapter; configure model.lora")
            return self._adapter_stream(_torch_dtype(dtype)), self.peft_config.to_dict()
        return self._stream(_torch_dtype(dtype)), None

    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        """Publish the weights as version ``meta.version``; blocks until they are written.

        The first rank publishes, the others help it to see whole tensors.

        Raises:
            WeightSyncError: the transport failed.
        """
        specs = self.get_param_specs(meta.dtype)
        stream, _ = self.get_per_tensor_param(meta.dtype)
        failure: BaseException | None = None
        try:
            if self.is_first_rank:
                publish(meta, specs, stream)
        except Exception as error:  # raised below, when no rank waits for this one any more
            failure = error
        for _ in stream:
            pass

        def report() -> None:
            if failure is not None:
                raise failure

        on_first_rank(self, report)

    def set_version(self, version: int) -> None:
        """The number of the last published update; kept in checkpoints."""
        self._version = version

    def get_version(self) -> int:
        return self._version

    # --- files --------------------------------------------------------------------------------

    def save(self, meta: SaveLoadMeta) -> None:
        """Write a Hugging Face directory that plain ``transformers`` loads.

        ``weight_format`` ``hf`` merges adapters, ``adapter`` writes the adapter alone;
        ``with_optim`` adds the training state in a subfolder.

        Raises:
            ConfigError: another ``weight_format``.
            CheckpointError: the directory cannot be written; an older one is left as it was.
            EngineError: some rank did not call it.
        """
        meet(self, "save")
        with self._placement.resident("model", "optimizer"):
            save_directory(self, meta)

    def load(self, meta: SaveLoadMeta) -> None:
        """Take the weights of a directory that ``save`` or ``transformers`` wrote.

        With ``with_optim`` the training state too. An engine with an adapter takes adapter
        directories, and merged ones only together with their training state.

        Raises:
            DataError: the weights do not fit this model.
            CheckpointError: the training state is missing or damaged.
        """
        with self._placement.resident("model", "optimizer"):
            load_directory(self, meta)

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Write the full training state.

        Inside a run's staging only the files are written to ``local_path``; copies and retention
        are the staging's then. Called alone, ``local_path`` is a run directory that gets
        ``checkpoints/step_N`` as one atomic whole; ``hdfs_path`` is an fsspec URL for a copy.

        Raises:
            ConfigError: ``hdfs_path`` or ``max_ckpt_to_keep`` inside a staging.
            CheckpointError: it cannot be written.
            EngineError: some rank did not call it.
        """
        meet(self, "save_checkpoint")
        with self._placement.resident("model", "optimizer"):
            save_checkpoint(self, Path(local_path), hdfs_path, global_step, max_ckpt_to_keep)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Restore what ``save_checkpoint`` wrote: its directory, or the newest of a run directory.

        With ``hdfs_path`` (the URL of one checkpoint) the checkpoint is downloaded to
        ``local_path`` first; ``del_local_after_load`` deletes only such a download.

        Raises:
            CheckpointError: nothing there, damaged, or of another model, adapter or tokenizer: the
                message lists all that differs, and nothing was changed.
        """
        with self._placement.resident("model", "optimizer"):
            load_checkpoint(self, Path(local_path), hdfs_path, del_local_after_load)

    # --- topology -----------------------------------------------------------------------------

    @abstractmethod
    def get_data_parallel_rank(self) -> int: ...

    @abstractmethod
    def get_data_parallel_size(self) -> int: ...

    @abstractmethod
    def get_data_parallel_group(self) -> Any:
        """The process group, or None with one rank."""

    @property
    @abstractmethod
    def parallelism_group(self) -> Any:
        """The group of all ranks of this engine, or None with one rank."""

    @abstractmethod
    def is_mp_src_rank_with_outputs(self) -> bool:
        """Whether this rank's outputs are to be collected (one of each model-parallel group)."""

    @abstractmethod
    def get_scheduling_config(self) -> Scheduling:
        """Resources that one rank needs."""

    # --- primitives of a backend --------------------------------------------------------------

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @abstractmethod
    def _build(self, addr: str | None) -> Any:
        """Join the process group and return the model on its device, adapter injected."""

    @abstractmethod
    def _build_optimizer(self) -> torch.optim.Optimizer: ...

    @abstractmethod
    def _release(self) -> None:
        """Give back what ``_build`` took."""

    @abstractmethod
    def _backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Accumulate the gradient of a summed loss; cancel the backend's own averaging.

        After the last micro-batch of a batch (``is_last``) the gradients are complete.
        """

    @abstractmethod
    def _grad_norm(self) -> float:
        """Global fp32 norm, every shard counted once."""

    @abstractmethod
    def _apply_gradients(self, norm: float) -> None:
        """Clip by the global norm and step the optimizer."""

    @abstractmethod
    def _full_tensor(self, tensor: Tensor) -> Tensor:
        """The whole of a possibly sharded tensor; all ranks must call."""

    @abstractmethod
    def _copy_full(self, into: Tensor, full: Tensor | None) -> None:
        """Copy the first rank's whole tensor into a possibly sharded one; all ranks must call.

        ``full`` is looked at on the first rank only.
        """

    # --- shared by all backends ---------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Of all ranks of this engine, whatever the axis."""
        group = self.parallelism_group
        return 0 if group is None else dist.get_rank(group)

    @property
    def is_first_rank(self) -> bool:
        """Whether this is the rank that reads and writes files and publishes."""
        return self.rank == 0

    def _gather_over_all(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order."""
        group = self.parallelism_group
        if group is None:
            return [value]
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, value, group=group)
        return found

    def _gather_over_ranks(self, value: Any) -> list[Any]:
        """The values of all data-parallel ranks, each counted once."""
        group = self.get_data_parallel_group()
        if group is None:
            return [value]
        found: list[Any] = [None] * self.get_data_parallel_size()
        dist.all_gather_object(found, value, group=group)
        return found

    def _sum_over_ranks(self, value: float) -> float:
        return math.fsum(self._gather_over_ranks(value))

    def _agree_max(self, value: int) -> int:
        return max(self._gather_over_ranks(value))

    def parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name; tied ones once."""
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def trainable_tensors(self) -> dict[str, Tensor]:
        """What training changes: parameters and, without an adapter, persistent buffers."""
        if self.lora is not None:
            return dict(self.parameters())
        return dict(self.model.state_dict(keep_vars=True))

    def counters(self) -> dict[str, Any]:
        return {
            "version": self._version,
            "schedule_step": self._schedule_step,
            "skipped_steps": self.skipped_steps,
            "skipped_in_row": self._skipped_in_row,
        }

    def restore_counters(self, counters: dict[str, Any]) -> None:
        self._version = counters["version"]
        self._schedule_step = 0 if self.config.restart_schedule else counters["schedule_step"]
        self.skipped_steps = counters["skipped_steps"]
        self._skipped_in_row = counters["skipped_in_row"]

    def _run(
        self,
        data: TensorDict,
        loss_fn: LossFn | None,
        loss_weight_fn: LossWeightFn | None,
        backward: bool,
        keep: Collection[str],
        trained_only: bool = False,
    ) -> StepResult:
        parts: tuple[Part, ...] = ("model", "grad") if backward else ("model",)
        with self._placement.resident(*parts), self._model_mode(backward):
            result = run_microbatches(
                self,
                data,
                loss_fn,
                loss_weight_fn,
                backward=backward,
                keep=keep,
                trained_only=trained_only,
            )
        if backward:
            self._has_weight = bool(self._has_weight) or result.has_weight
        return result

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.config.dtype == "bfloat16" else torch.float32

    def _score(
        self, packed: PackedRows, temperature_B: Tensor | None, names: Collection[str]
    ) -> dict[str, Tensor]:
        return score(self.model, packed, temperature_B, names, compute_dtype=self.compute_dtype)

    def _skip(self, norm: float) -> None:
        self.optimizer_zero_grad()
        self.skipped_steps += 1
        self._skipped_in_row += 1
        if self._skipped_in_row >= self.config.max_skipped_in_row:
            raise TrainingDiverged(
                f"the gradient norm was {norm} in {self._skipped_in_row} steps in a row "
                f"(max_skipped_in_row={self.config.max_skipped_in_row}); lower train.lr or check "
                "the rewards and log-probabilities of the last batches"
            )

    def _stream(self, dtype: torch.dtype | None) -> ParamStream:
        with self._placement.resident("model"):
            yield from full_tensors(self.model, self._full_tensor, dtype)

    def _adapter_stream(self, dtype: torch.dtype | None) -> ParamStream:
        with self._placement.resident("model"):
            for name, tensor in adapters.adapter_tensors(self.model).items():
                yield name, self._full_tensor(tensor).to(dtype or tensor.dtype)

    def adapter_specs(self, dtype: str | None = None) -> list[ParamSpec]:
        """Specs of the adapter-only stream."""
        chosen = _torch_dtype(dtype)
        tensors = adapters.adapter_tensors(self.model)
        return [spec_of(name, t, chosen or t.dtype) for name, t in tensors.items()]

    @contextmanager
    def _mode(self, name: str, parts: Sequence[Part], disable_auto_offload: bool) -> Iterator[None]:
        previous = self.mode
        was_training = self.model.training
        self._placement.restore(*parts)
        self.mode = name
        self.model.train(name == "train")
        try:
            yield
        finally:
            self.mode = previous
            self.model.train(was_training if previous is not None else True)
            if previous is None and not disable_auto_offload:
                self._offload_configured()

    def _offload_configured(self) -> None:
        self._placement.offload_enabled(
            {
                "model": self.is_param_offload_enabled,
                "optimizer": self.is_optimizer_offload_enabled,
                "grad": self.is_grad_offload_enabled,
            }
        )

    def _tensors_of(self, part: Part) -> list[Tensor]:
        """What this rank holds of a part."""
        if self._model is None:
            return []
        if part == "optimizer":
            tensors = optimizer_tensors(self.optimizer)
        elif part == "grad":
            tensors = [p.grad for p in self.model.parameters() if p.grad is not None]
        else:
            tensors = [*self.model.parameters(), *self.model.buffers()]
        return [local_part(tensor) for tensor in tensors]

    @contextmanager
    def _model_mode(self, training: bool) -> Iterator[None]:
        before = self.model.training
        self.model.train(training)
        try:
            yield
        finally:
            self.model.train(before)


def _needed_capabilities(config: TrainConfig, lora: LoraConfig | None) -> frozenset[str]:
    asked = {
        "lora": lora is not None,
        "bfloat16": config.dtype == "bfloat16",
        "gradient_checkpointing": config.gradient_checkpointing,
        "offload": config.offload_params or config.offload_optimizer or config.offload_grads,
        "tensor_parallel": config.parallel.tensor > 1,
        "sequence_parallel": config.parallel.sequence > 1,
        "hybrid_sharding": config.parallel.replicate > 1,
    }
    return frozenset(name for name, is_asked in asked.items() if is_asked)


def _torch_dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"dtype: got {name!r}, allowed: float32, bfloat16, float16")
    return dtype
