"""Checks of adapters: what trains, what the reference policy is, what an export contains."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from tandem.testing.conformance.batches import take
from tandem.testing.conformance.bench import Bench, largest
from tandem.testing.conformance.figure import Figure, Part, count
from tandem.testing.conformance.reference import PlainModel
from tandem.train import TrainEngine


def reference_policy(bench: Bench) -> Figure:
    """After training, ``disable_adapter`` is the base model, ``reference`` the adapter it started
    from, and both give the trained policy back."""
    bench.needs_lora()
    output = bench.subject.output
    subject = bench.subject
    base = PlainModel(bench.model_path(), subject.model_type)
    with torch.no_grad():
        without, start = base.outputs(bench.rows)[output], bench.plain().outputs(bench.rows)[output]
    with bench.engine(lr=2e-2) as engine:
        mine = bench.shard_rows(engine, bench.rows)
        rows = take(bench.rows, mine)
        _train(bench, engine)
        trained = engine.forward(rows)[output]
        with engine.disable_adapter():
            disabled = engine.forward(rows)[output]
        with engine.reference():
            referred = engine.forward(rows)[output]
        again = engine.forward(rows)[output]
        left = _leaves_after_error(bench, engine, rows, trained)
    index = torch.tensor(mine)
    moved = largest(trained, start[index])
    return [
        bench.output_part("disable_adapter", disabled, without[index]),
        bench.output_part("reference", referred, start[index]),
        Part("the policy afterwards", largest(again, trained), 0.0),
        Part("the policy after an error inside", left, 0.0),
        count("training moved the policy", [] if moved > 1e-3 else [f"only by {moved:.1g}"]),
    ]


def frozen_base(bench: Bench) -> Figure:
    """Only the adapter trains; the base keeps every bit and has no gradient."""
    bench.needs_lora()
    with bench.engine(lr=2e-2) as engine:
        trainable = engine.parameters()
        frozen = {n: p for n, p in engine.model.named_parameters() if n not in trainable}
        before = {name: engine._full_tensor(p.detach()).cpu().clone() for name, p in frozen.items()}
        _train(bench, engine)
        after = {name: engine._full_tensor(p.detach()).cpu() for name, p in frozen.items()}
        changed = [name for name in before if not torch.equal(before[name], after[name])]
        with_grad = [name for name, p in frozen.items() if p.grad is not None]
        strange = [name for name in trainable if not _belongs(name)]
    return [
        count("base weights that moved", changed),
        count("base weights with a gradient", with_grad),
        count("trainable parameters that are neither adapter nor head", strange),
        count("there is a base", [] if before else ["no frozen parameter"]),
    ]


def _belongs(name: str) -> bool:
    return ".lora_" in name or name.split(".")[0] in ("score", "classifier")


def _train(bench: Bench, engine: TrainEngine) -> None:
    batch = bench.shard(engine, bench.batch)
    for _ in range(2):
        engine.train_batch(batch, bench.case.loss_fn)


def _leaves_after_error(
    bench: Bench, engine: TrainEngine, rows: TensorDict, trained: Tensor
) -> float:
    for context in (engine.disable_adapter, engine.reference):
        try:
            with context():
                raise KeyError("on purpose")
        except KeyError:
            pass
    return largest(engine.forward(rows)[bench.subject.output], trained)
