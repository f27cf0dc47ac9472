"""Checks of weights on their way out: names, shapes, dtypes, and that they are the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tandem.testing.conformance.batches import take
from tandem.testing.conformance.bench import Bench, Tensors, largest
from tandem.testing.conformance.figure import Figure, Part, count
from tandem.testing.conformance.reference import PlainModel
from tandem.train import TrainEngine
from tandem.types import SaveLoadMeta


def names_and_shapes(bench: Bench) -> Figure:
    """Specs and stream agree with each other and with the model's own files, in every dtype."""
    on_disk = _files(Path(bench.model_path()))
    wrong: list[str] = []
    with bench.engine() as engine:
        for dtype in (None, "float32", "bfloat16"):
            stream, _ = engine.get_per_tensor_param(dtype)
            specs = engine.get_param_specs(dtype)
            found = [(name, tuple(t.shape), _dtype(t)) for name, t in stream]
            if found != [(spec.name, spec.shape, spec.dtype) for spec in specs]:
                wrong.append(f"stream and specs differ at dtype {dtype}")
            shapes = {name: shape for name, shape, _ in found}
            wrong += [
                f"{name}: {shapes.get(name)} instead of {on_disk.get(name)}"
                for name in sorted(shapes.keys() | on_disk.keys())
                if shapes.get(name) != on_disk.get(name)
            ]
            wrong += [f"{name} comes twice" for name in _repeated([name for name, *_ in found])]
            if dtype is not None:
                wrong += [
                    f"{name} is {kind}, not {dtype}" for name, _, kind in found if kind != dtype
                ]
    return [count("names, shapes and dtypes", wrong)]


def is_the_model(bench: Bench) -> Figure:
    """The stream, after training, loaded into a plain model, gives what the engine gives.

    With an adapter that is the merged model; the live weights keep every bit.
    """
    with bench.engine(lr=2e-2) as engine:
        mine = _train(bench, engine)
        rows = take(bench.rows, mine)
        before = engine.forward(rows)[bench.subject.output]
        tensors = _drain(engine, "float32")
        after = engine.forward(rows)[bench.subject.output]
    found = _plain_output(bench, bench.model_path(), tensors, rows)
    return [
        bench.output_part("plain model with the exported weights", found, before),
        Part("the engine afterwards", largest(after, before), 0.0),
    ]


def tied(bench: Bench) -> Figure:
    """Tied embeddings are exported once, before and after training, and stay tied."""
    bench.needs_type("language_model", "tied output projection")
    path = bench.model_path(tied=True)
    on_disk = _files(Path(path))
    with bench.engine(tied=True, lr=2e-2) as engine:
        mine = _train(bench, engine)
        rows = take(bench.rows, mine)
        before = engine.forward(rows)[bench.subject.output]
        stream, _ = engine.get_per_tensor_param("float32")
        found = [(name, tensor.detach().cpu().clone()) for name, tensor in stream]
    names = [name for name, _ in found]
    wrong = _repeated(names) + sorted(set(names) ^ set(on_disk))
    output = _plain_output(bench, path, dict(found), rows)
    return [
        count("names beyond those on disk, or twice", wrong),
        bench.output_part("plain tied model with the exported weights", output, before),
    ]


def directory(bench: Bench) -> Figure:
    """``save`` writes a directory that plain transformers loads, ``load`` takes it back."""
    target = bench.scratch / "saved"
    output = bench.subject.output
    with bench.engine(lr=2e-2) as engine:
        mine = _train(bench, engine)
        rows = take(bench.rows, mine)
        before = engine.forward(rows)[output]
        engine.save(SaveLoadMeta(str(target)))
        bench.barrier()
        names = _files(target)
        plain = PlainModel(str(target), bench.subject.model_type)
    with torch.no_grad():
        found = plain.outputs(rows)[output]
    missing = sorted(names.keys() ^ _files(Path(bench.model_path())).keys())
    parts = [
        count("names of the files", missing),
        bench.output_part("plain model from the directory", found, before),
    ]
    return [*parts, *_taken_back(bench, rows, before)]


def _taken_back(bench: Bench, rows: Any, before: Tensor) -> Figure:
    """What one engine saved, in another: the whole model, or the adapter alone."""
    kind = "adapter" if bench.subject.lora else "hf"
    target = bench.scratch / f"saved_{kind}"
    with bench.engine(lr=2e-2) as engine:
        _train(bench, engine)
        engine.save(SaveLoadMeta(str(target), weight_format=kind))
        bench.barrier()
    with bench.engine() as engine:
        engine.load(SaveLoadMeta(str(target), weight_format=kind))
        found = engine.forward(rows)[bench.subject.output]
    return [bench.output_part(f"an engine that loaded it ({kind})", found, before)]


def _train(bench: Bench, engine: TrainEngine) -> list[int]:
    batch = bench.shard(engine, bench.batch)
    for _ in range(2):
        engine.train_batch(batch, bench.case.loss_fn)
    return bench.shard_rows(engine, bench.rows)


def _drain(engine: TrainEngine, dtype: str) -> Tensors:
    stream, _ = engine.get_per_tensor_param(dtype)
    return {name: tensor.detach().cpu().clone() for name, tensor in stream}


def _plain_output(bench: Bench, path: str, tensors: Tensors, rows: Any) -> Tensor:
    plain = PlainModel(path, bench.subject.model_type)
    loaded = plain.base.load_state_dict(tensors, strict=False)
    own = dict(plain.base.named_parameters())
    unfilled = sorted(set(loaded.missing_keys) & own.keys())
    if unfilled or loaded.unexpected_keys:
        return torch.full((1,), torch.nan)
    with torch.no_grad():
        return plain.outputs(rows)[bench.subject.output]


def _files(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes in the safetensors files of a directory."""
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                found[name] = tuple(tensors.get_slice(name).get_shape())
    return found


def _repeated(names: list[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
