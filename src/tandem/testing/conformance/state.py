"""Checks of what an engine leaves behind: modes, placement, the caller's batch, memory."""

from __future__ import annotations

import gc
import math
import time
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from tandem.config.schema import LoraConfig, TrainConfig
from tandem.errors import CapabilityError
from tandem.testing.conformance.batches import jagged, make_batch
from tandem.testing.conformance.bench import Bench
from tandem.testing.conformance.figure import Figure, NotApplicable, Part, count
from tandem.testing.conformance.losses import Wrapped
from tandem.train import EngineRegistry, TrainEngine
from tandem.types import Metric

NUM_MICROBATCHES = 50
PARTS = ("model", "optimizer", "grad")
SETTLING_S = 5.0


def modes(bench: Bench) -> Figure:
    """Both contexts set ``mode``, give the old one back after errors too, and zero if asked to."""
    wrong: list[str] = []
    with bench.engine() as engine:
        batch = bench.shard(engine, bench.batch)
        for name, context in (("train", engine.train_mode), ("eval", engine.eval_mode)):
            with context():
                wrong += [f"{name}_mode: mode is {engine.mode!r}"] * (engine.mode != name)
                is_training = bool(engine.model.training)
                wrong += [f"{name}_mode: training is {is_training}"] * (
                    is_training != (name == "train")
                )
            wrong += [f"mode after {name}_mode is {engine.mode!r}"] * (engine.mode is not None)
            try:
                with context():
                    raise KeyError("on purpose")
            except KeyError:
                wrong += [f"mode after an error is {engine.mode!r}"] * (engine.mode is not None)
        for zero in (False, True):
            with engine.train_mode(zero_grad_on_exit=zero):
                engine.forward_backward_batch(batch, bench.case.loss_fn)
            has_grad = any(p.grad is not None for p in engine.parameters().values())
            wrong += [f"gradients with zero_grad_on_exit={zero}: {has_grad}"] * (has_grad is zero)
        returned = [engine.eval() is engine, engine.train() is engine]
        wrong += [f"train() and eval() return {returned}"] * (not all(returned))
    return [count("modes", wrong)]


def placement(bench: Bench) -> Figure:
    """What is offloaded has no memory on the device, outside of contexts and after errors too."""
    bench.needs("offload")
    wrong: list[str] = []
    config = {"offload_params": True, "offload_optimizer": True, "offload_grads": True}
    with bench.engine(**config) as engine:
        batch = bench.shard(engine, bench.batch)
        wrong += _on_device(engine, "after initialize")
        with engine.train_mode():
            engine.train_batch(batch, bench.case.loss_fn)
            wrong += [f"{p} is away in train_mode" for p in PARTS if not _bytes(engine, p)]
        wrong += _on_device(engine, "after train_mode")
        with engine.eval_mode():
            engine.forward(batch)
        wrong += _on_device(engine, "after eval_mode")
        for context in (engine.train_mode, engine.eval_mode):
            try:
                with context():
                    raise KeyError("on purpose")
            except KeyError:
                wrong += _on_device(engine, "after an error")
        with engine.eval_mode(disable_auto_offload=True):
            pass
        wrong += ["disable_auto_offload: the model is away"] * (not _bytes(engine, "model"))
        engine.to("host")
        wrong += _on_device(engine, "after to('host')")
        engine.to("device")
        wrong += [f"{p} is away after to('device')" for p in PARTS if not _bytes(engine, p)]
    return [count("bytes on the device", wrong)]


def batch_untouched(bench: Bench) -> Figure:
    """Training and scoring leave the caller's batch as it was, in every layout."""
    wrong: list[str] = []
    with bench.engine(microbatch_size=2, max_grad_norm=1.0) as engine:
        padded = bench.shard(engine, bench.batch)
        for layout, batch in (("padded", padded), ("jagged", jagged(padded))):
            tensors = dict(batch.items())
            copies = {name: _flat(tensor).clone() for name, tensor in tensors.items()}
            for call in ("forward", "infer_batch", "eval_batch", "train_batch"):
                losses = (bench.case.loss_fn,) if call in ("eval_batch", "train_batch") else ()
                getattr(engine, call)(batch, *losses)
                wrong += [f"{call}, {layout}: {what}" for what in _changes(batch, tensors, copies)]
    return [count("changes of the caller's batch", wrong)]


def flat_memory(bench: Bench) -> Figure:
    """Over 50 micro-batches no graph is kept and no tensor of theirs stays alive."""
    graphs: list[weakref.ref[Any]] = []
    outputs_seen: list[weakref.ref[Any]] = []
    alive: list[tuple[int, int]] = []

    def watch(outputs: Mapping[str, Tensor], microbatch: TensorDict) -> None:
        alive.append((_alive(graphs), _alive(outputs_seen)))
        outputs_seen.extend(weakref.ref(value) for value in outputs.values())

    def mark(loss: Tensor, metrics: Any, microbatch: TensorDict) -> Any:
        loss = _Mark.apply(loss, graphs)
        return loss, {"kit/loss": Metric(loss, 1.0, "sum")}

    loss_fn = Wrapped(bench.case.loss_fn, watch=watch, change=mark)
    with bench.engine(microbatch_size=1) as engine:
        size = engine.get_data_parallel_size()
        rows = bench.complete(make_batch((4,) * (NUM_MICROBATCHES * size)))
        batch = bench.shard(engine, bench.weighted(rows, bench.case))
        engine.train_batch(batch[:2], loss_fn)
        engine.optimizer_zero_grad()
        alive.clear()
        before = _live_bytes()
        engine.train_batch(batch, loss_fn)
        engine.optimizer_zero_grad()
        grown = _bytes_more_than(before)
        engine.forward(batch)
        scored = _bytes_more_than(before)
    num_outputs = len(loss_fn.required_outputs)
    return [
        Part(f"graphs alive, of {NUM_MICROBATCHES}", float(max(g for g, _ in alive)), 1.0),
        Part("outputs alive", float(max(o for _, o in alive)), float(num_outputs)),
        Part("graphs alive afterwards", float(_alive(graphs)), 0.0),
        Part("bytes more after training", float(grown), 0.0),
        Part("bytes more after scoring", float(scored), 0.0),
        count("every micro-batch was seen", [f"{len(alive)}"] * (len(alive) != NUM_MICROBATCHES)),
    ]


def metrics(bench: Bench) -> Figure:
    """Metrics of micro-batches and ranks: means by their weights, and sum, min, max as declared."""

    def measure(loss: Tensor, metrics: Any, microbatch: TensorDict) -> Any:
        lengths = microbatch["attention_mask"].sum(1).float()
        warmth = microbatch["temperature"]
        return loss, {
            "kit/mean": Metric((lengths * warmth).sum() / lengths.sum(), lengths.sum()),
            "kit/sum": Metric(lengths.sum(), 1.0, "sum"),
            "kit/min": Metric(lengths.min(), 1.0, "min"),
            "kit/max": Metric(lengths.max(), 1.0, "max"),
            "kit/absent": Metric(math.nan, 1.0),
        }

    loss_fn = Wrapped(bench.case.loss_fn, change=measure)
    whole = bench.batch
    # Only rows with weight are seen by the loss.
    seen = (whole["loss_weights"] != 0).view(whole.batch_size[0], -1).any(1)
    lengths = whole["attention_mask"].sum(1)[seen].double()
    with bench.engine(microbatch_size=1) as engine:
        batch = bench.shard(engine, whole, uneven=True)
        found = engine.train_batch(batch, loss_fn)
    expected = {
        "kit/mean": float((lengths * whole["temperature"][seen]).sum() / lengths.sum()),
        "kit/sum": float(lengths.sum()),
        "kit/min": float(lengths.min()),
        "kit/max": float(lengths.max()),
        "num_rows": float(whole.batch_size[0]),
        "num_tokens": float(whole["attention_mask"].sum()),
        "num_trained_tokens": float(whole["loss_mask"].sum()),
    }
    parts = [Part(n, abs(found.get(n, math.inf) - v), 1e-6 * abs(v)) for n, v in expected.items()]
    return [*parts, count("means of nothing", ["kit/absent"] * ("kit/absent" in found))]


def topology(bench: Bench) -> Figure:
    """Ranks and sizes fit together, and the life cycle may be repeated."""
    subject = bench.subject
    wrong: list[str] = []
    with bench.engine() as engine:
        rank, size = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
        sources = engine._sum_over_ranks(1.0)
        wrong += [f"data-parallel rank {rank} of {size}"] * (not 0 <= rank < size)
        wrong += [f"{size} data-parallel ranks of {subject.world}"] * bool(subject.world % size)
        wrong += [f"a sum over {size} ranks counts {sources}"] * (sources != size)
        wrong += ["a gather over ranks loses some"] * (
            sorted(engine._gather_over_ranks(rank)) != list(range(size))
        )
        wrong += ["_agree_max is not the maximum"] * (engine._agree_max(rank) != size - 1)
        before = id(engine.model)
        engine.initialize()
        wrong += ["a second initialize loads again"] * (id(engine.model) != before)
        engine.destroy()
    scheduling = engine.get_scheduling_config()
    wrong += [f"asks for {scheduling}"] * (scheduling.cpu < 1 or scheduling.mem < 1)
    return [count("topology and life cycle", wrong)]


def capabilities(bench: Bench) -> Figure:
    """What the backend does not declare is refused at construction, by name."""
    subject = bench.subject
    cls = EngineRegistry.get_engine_cls(subject.model_type, subject.backend, subject.device)
    asked: dict[str, tuple[dict[str, Any], LoraConfig | None]] = {
        "bfloat16": ({"dtype": "bfloat16"}, None),
        "gradient_checkpointing": ({"gradient_checkpointing": True}, None),
        "offload": ({"offload_params": True}, None),
        "lora": ({}, LoraConfig(rank=4)),
        "tensor_parallel": ({"parallel": {"tensor": 2}}, None),
        "sequence_parallel": ({"parallel": {"sequence": 2}}, None),
        "hybrid_sharding": ({"parallel": {"replicate": 2}}, None),
    }
    lacking = [name for name in asked if name not in cls.capabilities]
    if not lacking:
        raise NotApplicable(f"{cls.__name__} declares all of {', '.join(asked)}")
    wrong = []
    for name in lacking:
        config, lora = asked[name]
        options = {"backend": subject.backend, "device": subject.device} | config
        try:
            cls(TrainConfig(**options), model_path=bench.model_path(), lora=lora)
            wrong.append(f"{name} is taken")
        except CapabilityError as error:
            wrong += [f"{name} is not named: {error}"] * (name not in str(error))
    return [count("refusals", wrong)]


class _Mark(torch.autograd.Function):
    """The identity, whose node in the graph can be watched."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, graphs: list[weakref.ref[Any]]) -> Tensor:
        ctx.token = _Token()
        graphs.append(weakref.ref(ctx.token))
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None]:
        return grads[0], None


class _Token:
    """Lives as long as the node of the graph that holds it."""


def _alive(refs: list[weakref.ref[Any]]) -> int:
    return sum(ref() is not None for ref in refs)


def _bytes_more_than(before: int) -> int:
    """What stays: a thread of the process group may let go of a message a moment after its end."""
    deadline = time.monotonic() + SETTLING_S
    while (more := _live_bytes() - before) > 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    return more


def _live_bytes() -> int:
    """Memory behind all tensors that Python can reach."""
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        if type(item) in (Tensor, torch.nn.Parameter):
            storage = item.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def _changes(batch: TensorDict, tensors: dict[str, Tensor], copies: dict[str, Tensor]) -> list[str]:
    now = dict(batch.items())
    if now.keys() != tensors.keys():
        return [f"{name} came or went" for name in sorted(now.keys() ^ tensors.keys())]
    return [
        f"{name} was written to"
        for name, tensor in now.items()
        if not torch.equal(_flat(tensor), copies[name])
    ]


def _flat(tensor: Tensor) -> Tensor:
    return tensor.values() if tensor.is_nested else tensor


def _on_device(engine: TrainEngine, when: str) -> list[str]:
    return [f"{when}: {size} bytes of {p}" for p in PARTS if (size := _bytes(engine, p))]


def _bytes(engine: TrainEngine, part: str) -> int:
    """Live storage of a part on the engine's device."""
    total = 0
    for tensor in engine._tensors_of(part):  # type: ignore[arg-type]
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.device.type == engine.device.type:
            total += local.untyped_storage().nbytes()
    return total
