"""The train engine for many ranks: parameters, gradients and optimizer state are sharded.

Only the primitives: sharding with FSDP2, over whole copies (HSDP) if asked for, of layers that
``tensor_parallel`` may have divided before, on tokens that ``sequence_parallel`` may have divided.
The layout of ranks is ``mesh``.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
from collections.abc import Collection, Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from tandem.config.launcher import launcher_facts
from tandem.data.packing import PackedRows, pack
from tandem.errors import CapabilityError, EngineError
from tandem.models.heads import head_name, scalar_head
from tandem.train import process_group
from tandem.train.building import build_model, check_device, enable_checkpointing, model_bytes
from tandem.train.engine import TrainEngine
from tandem.train.forward import score
from tandem.train.mesh import Mesh, build_mesh
from tandem.train.optim import build_optimizer, gradients, scale_gradients, squared_norm
from tandem.train.ranks import from_first_rank, on_first_rank
from tandem.train.sequence_parallel import SequenceGroup, check_positions
from tandem.train.shards import class_name, local_part, num_copies, own_slice, whole_tensor
from tandem.train.step import StepResult
from tandem.train.tensor_parallel import divide_layers
from tandem.types import Scheduling


class FSDPTrainEngine(TrainEngine):
    """Trains one model on all ranks of a process group, under torchrun or as a single process.

    Masters, gradients and optimizer state are fp32 shards; ``dtype=bfloat16`` gathers and computes
    in bf16 and reduces gradients in fp32. The first rank reads the model on its host, the others
    receive their shards. Gradients are summed over data-parallel ranks, never averaged.
    """

    capabilities: ClassVar[frozenset[str]] = frozenset(
        {
            "bfloat16",
            "gradient_checkpointing",
            "hybrid_sharding",
            "language_model",
            "lora",
            "offload",
            "reward_model",
            "sequence_parallel",
            "tensor_parallel",
            "value_model",
        }
    )
    spans_ranks = True
    _layout: Mesh | None = None
    _sequence: SequenceGroup | None = None
    _is_member = False

    @property
    def device(self) -> torch.device:
        name = self.config.device or ("cuda" if torch.cuda.is_available() else "cpu")
        return process_group.local_device(name)

    # --- topology -----------------------------------------------------------------------------

    @property
    def layout(self) -> Mesh:
        """The axes of this engine's ranks."""
        if self._layout is None:
            raise EngineError(f"{type(self).__name__}: call initialize() first")
        return self._layout

    def get_data_parallel_rank(self) -> int:
        return self.layout.data_rank

    def get_data_parallel_size(self) -> int:
        return self.layout.data_size

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        return self.layout.data if self.layout.data_size > 1 else None

    @property
    def parallelism_group(self) -> dist.ProcessGroup | None:
        num_ranks = self.layout.data_size * self.layout.model_size
        return dist.group.WORLD if num_ranks > 1 else None

    def is_mp_src_rank_with_outputs(self) -> bool:
        return self.layout.model_rank == 0

    def get_scheduling_config(self) -> Scheduling:
        """As the local engine's, sharded; each rank's host must have room for the whole model."""
        size = model_bytes(self.model_path)
        mem = 2048 + (size * 8 // launcher_facts().world_size + size * 2) // 2**20
        return Scheduling(cpu=1, gpu=int(self.device.type != "cpu"), mem=mem)

    # --- building -----------------------------------------------------------------------------

    def _build(self, addr: str | None) -> Any:
        check_device(self.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._is_member = process_group.join(self.device.type, addr, self.config.parallel.timeout_s)
        try:
            return self._build_sharded()
        except BaseException:
            self._release()
            raise

    def _build_sharded(self) -> Any:
        self._layout = build_mesh(self.config.parallel, self.device.type)
        if self._layout.sequence is not None:
            self._sequence = SequenceGroup(self._layout.sequence)
        built = on_first_rank(
            self,
            lambda: build_model(
                self.model_type,
                self.model_path,
                self.config,
                self.lora,
                seed=self.seed,
                device=torch.device("cpu"),
            ),
        )
        whole, peft_config = built or (None, None)
        model, self.peft_config = from_first_rank(
            self, None if whole is None else (_without_memory(whole), peft_config)
        )
        enable_checkpointing(model, self.config)
        self._shard(model)
        _materialise(model, self.device)
        source = None if whole is None else dict(_named_tensors(whole))
        for name, tensor in _named_tensors(model):
            self._copy_full(tensor, None if source is None else source[name])
        self._check_scores(model, whole)
        return model

    def _shard(self, model: Any) -> None:
        if self._sequence is not None:
            check_positions(model)
        if self.layout.tensor is not None:
            divide_layers(model, self.layout.tensor)
        blocks = set(model._no_split_modules or ())
        units = [module for module in model.modules() if type(module).__name__ in blocks]
        heads = [] if head_name(model) is None else [scalar_head(model)]
        # The root is resharded after the forward pass too: a pass without a backward would leave
        # it gathered, and the next one would see old weights.
        for unit in [*units, *heads, model]:
            policy = MixedPrecisionPolicy(
                param_dtype=None if unit in heads else self.compute_dtype,
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,
            )
            fully_shard(
                unit, mesh=self.layout.sharding, mp_policy=policy, reshard_after_forward=True
            )
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        model.score_rows = functools.partial(_score_rows, model)
        register_fsdp_forward_method(model, "score_rows")

    def _check_scores(self, model: Any, whole: Any) -> None:
        """Compare the sharded model to the whole one on a few tokens, without dropout."""
        for each in (model, whole):
            if each is not None:
                each.eval()
        vocabulary = model.get_input_embeddings().weight.shape[0]
        ids = (torch.arange(11) * 7 % vocabulary)[None]
        rows = pack(ids, torch.ones_like(ids, dtype=torch.bool))

        def expected() -> dict[str, Tensor]:
            return score(whole, rows, None, self.output_names, compute_dtype=whole.dtype)

        with torch.no_grad():
            found = self._score_with(model, rows.to(self.device), None, self.output_names)
            theirs = from_first_rank(self, on_first_rank(self, expected))
        for name, value in theirs.items():
            error = float((found[name].cpu() - value).abs().max())
            allowed = 1e-3 if self.config.dtype == "float32" else 0.2
            if not error <= allowed * float(value.abs().max().clamp(min=1.0)):
                raise CapabilityError(
                    f"{class_name(model)}: {name} of the sharded model differ from the whole "
                    f"model's by {error:.2g}; this architecture cannot be trained with "
                    f"train.parallel.tensor={self.config.parallel.tensor} and "
                    f"train.parallel.sequence={self.config.parallel.sequence}"
                )

    def _build_optimizer(self) -> torch.optim.Optimizer:
        return build_optimizer(self.parameters(), self.config)

    def _release(self) -> None:
        self._model = self._optimizer = self._layout = self._sequence = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if self._is_member:
            self._is_member = False
            process_group.leave()

    # --- primitives ---------------------------------------------------------------------------

    def _run(self, *args: Any, **kwargs: Any) -> StepResult:
        try:
            return super()._run(*args, **kwargs)
        except BaseException:
            # Gathered parameters and gradients that wait for their reduction are of no use now.
            if self._model is not None:
                _abandon_iteration(self._model)
            raise

    def _score(
        self, packed: PackedRows, temperature_B: Tensor | None, names: Collection[str]
    ) -> dict[str, Tensor]:
        # Without a backward pass nothing would end the time of gathered weights.
        keeps = torch.is_grad_enabled() and not self.config.parallel.gather_per_microbatch
        self.model.set_reshard_after_forward(not keeps)
        return self._score_with(self.model, packed, temperature_B, names)

    def _score_with(
        self,
        model: Any,
        packed: PackedRows,
        temperature_B: Tensor | None,
        names: Collection[str],
    ) -> dict[str, Tensor]:
        ranks, dtype = self._sequence, self.compute_dtype
        found: dict[str, Tensor]
        if ranks is None:
            found = model.score_rows(packed, temperature_B, names, compute_dtype=dtype)
            return found
        found = model.score_rows(
            ranks.part(packed),
            temperature_B,
            names,
            compute_dtype=dtype,
            attention=ranks.attention,
        )
        return ranks.join(found)

    def _backward(self, loss: Tensor, *, is_last: bool) -> None:
        if not self.config.parallel.reduce_per_microbatch:
            self.model.set_requires_gradient_sync(is_last)
        if not self.config.parallel.gather_per_microbatch:
            self.model.set_reshard_after_backward(is_last)
        loss.backward()

    def _grad_norm(self) -> float:
        total = torch.zeros((), device=self.device)
        by_copies: dict[int, list[Tensor]] = {}
        for grad in gradients(self.parameters().values()):
            by_copies.setdefault(num_copies(grad), []).append(local_part(grad))
        for copies, grads in by_copies.items():
            total += squared_norm(grads) / copies
        dist.all_reduce(total)
        return float(total.sqrt())

    def _apply_gradients(self, norm: float) -> None:
        grads = [local_part(grad) for grad in gradients(self.parameters().values())]
        with torch.no_grad():
            scale_gradients(grads, norm, self.config.max_grad_norm)
        self.optimizer.step()

    def _full_tensor(self, tensor: Tensor) -> Tensor:
        return whole_tensor(tensor)

    def _copy_full(self, into: Tensor, full: Tensor | None) -> None:
        whole = torch.empty(into.shape, dtype=into.dtype, device=self.device)
        if self.is_first_rank:
            assert full is not None
            whole.copy_(full)
        dist.broadcast(whole, group_src=0)
        part = own_slice(into, whole) if isinstance(into, DTensor) else whole
        with torch.no_grad():
            local_part(into).copy_(part)


class FSDPValueEngine(FSDPTrainEngine):
    """The same with a scalar head, in fp32: the value of every state."""

    model_type = "value_model"


class FSDPRewardEngine(FSDPTrainEngine):
    """The same with a scalar head, in fp32: the score of every row."""

    model_type = "reward_model"


def _score_rows(model: Any, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    """Outputs in memory of their own: a loss may change them in place, views would lose a hook."""
    return {name: value.clone() for name, value in score(model, *args, **kwargs).items()}


def _abandon_iteration(model: Any) -> None:
    """Shards as before the pass that failed; gradients that it has not reduced are dropped."""
    model.reset_iter_state()
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter.unsharded_param.grad = None


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and all buffers, also those that no file has; tied ones once."""
    return itertools.chain(model.named_parameters(), model.named_buffers())


def _without_memory(model: nn.Module) -> nn.Module:
    """The same modules around tensors on the meta device; what is tied stays tied."""
    memo: dict[int, Any] = {}
    for _, tensor in _named_tensors(model):
        empty = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = empty
    return copy.deepcopy(model, memo)


def _materialise(model: nn.Module, device: torch.device) -> None:
    """Give every tensor memory; tied parameters, which that takes apart, are tied again."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((module, name))
    model.to_empty(device=device)
    for (first, first_name), *others in owners.values():
        for module, name in others:
            setattr(module, name, getattr(first, first_name))
