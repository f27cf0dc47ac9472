"""What a check works with: engines under test, the oracle, the plain model, batches and shards.

No check is written here; every rank has a bench of its own over one shared scratch directory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from tandem.config.schema import LoraConfig, TrainConfig
from tandem.testing.conformance import batches
from tandem.testing.conformance.figure import NotApplicable, Part
from tandem.testing.conformance.losses import STANDARD, LossCase
from tandem.testing.conformance.models import write_adapter, write_model
from tandem.testing.conformance.reference import PlainModel
from tandem.testing.conformance.subject import Subject
from tandem.train import EngineRegistry, TrainEngine
from tandem.types import FinetuneSpec

T = TypeVar("T")
Tensors = dict[str, Tensor]
TOTAL_STEPS = 8


@dataclass(frozen=True, slots=True)
class Pass:
    """Loss and gradient of one whole step, before clipping."""

    loss: float
    norm: float
    gradients: Tensors


@dataclass
class Bench:
    """``scratch`` is shared by all ranks and empty at the start but for the models."""

    subject: Subject
    scratch: Path
    _kept: dict[str, Any] = field(default_factory=dict)

    # --- models and engines -------------------------------------------------------------------

    def model_path(self, *, tied: bool = False) -> str:
        return str(self.scratch / ("tied" if tied else "model"))

    def adapter_path(self, *, dropout: bool = False) -> str | None:
        if not self.subject.lora:
            return None
        return str(self.scratch / ("dropout_adapter" if dropout else "adapter"))

    def write_models(self) -> None:
        """Called once, by one process, before any rank starts."""
        model_type = self.subject.model_type
        self.scratch.mkdir(parents=True, exist_ok=True)
        model = write_model(self.scratch / "model", model_type, tied=False)
        if model_type == "language_model":
            write_model(self.scratch / "tied", model_type, tied=True)
        if self.subject.lora:
            for name, dropout in (("adapter", 0.0), ("dropout_adapter", 0.5)):
                write_adapter(self.scratch / name, model, model_type, dropout=dropout)

    @contextmanager
    def engine(
        self, *, tied: bool = False, dropout: bool = False, **config: Any
    ) -> Iterator[TrainEngine]:
        """The engine under test, initialised; ``config`` changes its ``TrainConfig``."""
        subject = self.subject
        options = {"backend": subject.backend, "device": subject.device, "dtype": subject.dtype}
        with self._engine(options | dict(subject.train) | config, tied, dropout) as engine:
            yield engine

    @contextmanager
    def oracle(self, *, tied: bool = False, **config: Any) -> Iterator[TrainEngine]:
        """The local engine in fp32 on the CPU, which sees whole batches."""
        options = {"backend": "local", "device": "cpu"}
        with self._engine(options | config, tied, False) as engine:
            yield engine

    @contextmanager
    def _engine(self, config: dict[str, Any], tied: bool, dropout: bool) -> Iterator[TrainEngine]:
        adapter = self.adapter_path(dropout=dropout)
        engine = EngineRegistry.new(
            self.subject.model_type,
            config["backend"],
            config=TrainConfig(**{"max_grad_norm": None, "lr": 1e-3, "eps": 1e-3} | config),
            model_path=self.model_path(tied=tied),
            lora=None if adapter is None else LoraConfig(adapter_path=adapter),
            seed=0,
        )
        engine.initialize(ft_spec=FinetuneSpec(1, TOTAL_STEPS, 1))
        try:
            yield engine
        finally:
            engine.destroy()

    def plain(self, *, tied: bool = False) -> PlainModel:
        return PlainModel(self.model_path(tied=tied), self.subject.model_type, self.adapter_path())

    # --- what does not apply ------------------------------------------------------------------

    def needs(self, capability: str) -> None:
        """Leave the check unless the backend declares ``capability``."""
        subject = self.subject
        engine = EngineRegistry.get_engine_cls(subject.model_type, subject.backend, subject.device)
        if capability not in engine.capabilities:
            raise NotApplicable(f"{engine.__name__} does not declare {capability}")

    def needs_type(self, model_type: str, what: str) -> None:
        if self.subject.model_type != model_type:
            raise NotApplicable(f"a {self.subject.model_type} has no {what}")

    def needs_ranks(self, engine: TrainEngine) -> None:
        """Leave the check unless there are several data-parallel ranks."""
        if engine.get_data_parallel_size() == 1:
            raise NotApplicable("one data-parallel rank")

    def needs_lora(self) -> None:
        if not self.subject.lora:
            raise NotApplicable("no adapter; run with --lora")

    # --- batches ------------------------------------------------------------------------------

    @property
    def case(self) -> LossCase:
        return STANDARD[self.subject.model_type]

    @property
    def batch(self) -> TensorDict:
        """The usual batch of a whole step, ready for the standard loss."""
        return self.weighted(self.rows, self.case)

    @property
    def rows(self) -> TensorDict:
        """The same without weights."""
        return self.kept("rows", lambda: self.complete(batches.make_batch()))

    def start(self) -> Tensors:
        """The trainable parameters before any training."""
        return {name: p.detach().clone() for name, p in self.plain().parameters().items()}

    def complete(self, batch: TensorDict) -> TensorDict:
        with torch.no_grad():
            outputs = self.plain().outputs(batch)
        return batches.with_truth(batch, outputs)

    def weighted(self, batch: TensorDict, case: LossCase, mode: str = "token-mean") -> TensorDict:
        return batches.with_weights(batch, mode, per_row=case.per_row)

    def shard_rows(
        self, engine: TrainEngine, batch: TensorDict, *, uneven: bool = False
    ) -> list[int]:
        rank, size = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
        return batches.shard_rows(batch.batch_size[0], rank, size, uneven=uneven)

    def shard(self, engine: TrainEngine, batch: TensorDict, *, uneven: bool = False) -> TensorDict:
        return batches.take(batch, self.shard_rows(engine, batch, uneven=uneven))

    # --- measuring ----------------------------------------------------------------------------

    def kept(self, name: str, compute: Callable[[], T]) -> T:
        """A value computed once for all checks; nobody may change it."""
        if name not in self._kept:
            self._kept[name] = compute()
        found: T = self._kept[name]
        return found

    def expected(self) -> Pass:
        """The oracle's pass over ``batch``."""

        def compute() -> Pass:
            with self.oracle() as oracle:
                return one_pass(oracle, self.batch, self.case)

        return self.kept("expected", compute)

    def compare(self, name: str, found: Pass, expected: Pass) -> list[Part]:
        tolerance = self.subject.tolerance
        return [
            Part(f"{name}, loss", loss_miss(found.loss, expected.loss), tolerance.loss),
            gradient_part(name, found.gradients, expected.gradients, tolerance.gradient),
        ]

    def output_part(self, name: str, found: Tensor, expected: Tensor) -> Part:
        return Part(name, largest(found, expected), self.subject.tolerance.output)

    def barrier(self) -> None:
        if self.subject.world > 1:
            dist.barrier()


def one_pass(
    engine: TrainEngine, batch: TensorDict, case: LossCase, *, zero: bool = True, **options: Any
) -> Pass:
    """Zero, forward and backward; the gradient as the optimizer step would see it."""
    if zero:
        engine.optimizer_zero_grad()
    loss = engine.forward_backward_batch(batch, case.loss_fn, **options).loss
    norm, gradients = gradients_at_step(engine)
    return Pass(loss, norm, gradients)


def gradients_at_step(engine: TrainEngine) -> tuple[float, Tensors]:
    """The norm that ``optimizer_step`` returns and the whole gradients; no step is taken.

    They are read where a backend would clip and step, because that is the first moment at which the
    contract lets nobody's share of the gradient be missing.
    """
    found: Tensors = {}

    def read(norm: float) -> None:
        for name, parameter in engine.parameters().items():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found[name] = engine._full_tensor(grad.detach()).cpu().clone()

    with replaced(engine, "_apply_gradients", read):
        norm = engine.optimizer_step()
    return norm, found


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """A method of one object replaced for a while."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
        if own is not None:
            setattr(owner, name, own)


def weights(engine: TrainEngine) -> Tensors:
    """Copies of the whole trainable parameters."""
    with engine.train_mode(disable_auto_offload=False):
        return {
            name: engine._full_tensor(parameter.detach()).cpu().clone()
            for name, parameter in engine.parameters().items()
        }


def largest(found: Tensor, expected: Tensor) -> float:
    """Largest elementwise difference; NaN and differing shapes count as infinite."""
    if found.shape != expected.shape:
        return float("inf")
    if not found.numel():
        return 0.0
    miss = (found.detach().cpu().double() - expected.detach().cpu().double()).abs().max()
    return float(miss.nan_to_num(nan=torch.inf))


def loss_miss(found: float, expected: float) -> float:
    return abs(found - expected) / max(1.0, abs(expected))


def gradient_part(name: str, found: Tensors, expected: Tensors, tolerance: float) -> Part:
    """The largest miss of an element over the norm of the whole gradient, and where it is."""
    if differing := sorted(found.keys() ^ expected.keys()):
        return Part(f"{name}, gradient of {differing[0]} on one side only", float("inf"), tolerance)
    norm = float(torch.stack([g.double().norm() for g in expected.values()]).norm())
    misses = {key: largest(found[key], expected[key]) / (norm or 1.0) for key in expected}
    worst = max(misses, key=lambda key: misses[key])
    return Part(f"{name}, gradient of {worst}", misses[worst], tolerance)


def weight_part(name: str, found: Tensors, expected: Tensors, tolerance: float) -> Part:
    """The largest miss of an element of any tensor."""
    if differing := sorted(found.keys() ^ expected.keys()):
        return Part(f"{name}, {differing[0]} on one side only", float("inf"), tolerance)
    misses = {key: largest(found[key], expected[key]) for key in expected}
    worst = max(misses, key=lambda key: misses[key])
    return Part(f"{name}, {worst}", misses[worst], tolerance)


def movement_part(
    name: str, found: Tensors, expected: Tensors, start: Tensors, tolerance: float
) -> Part:
    """Norm of the difference over the norm of the way from ``start``, all tensors together."""
    if differing := sorted(found.keys() ^ expected.keys()):
        return Part(f"{name}, {differing[0]} on one side only", float("inf"), tolerance)
    way = _distance(expected, start)
    return Part(name, _distance(found, expected) / way if way else float("inf"), tolerance)


def _distance(left: Tensors, right: Tensors) -> float:
    parts = [(left[key].double() - right[key].double()).norm() for key in right]
    return float(torch.stack(parts).norm().nan_to_num(nan=torch.inf))
