"""The training state of an engine as files: what a resume needs to go on bit for bit.

Atomicity, manifests and retention are ``tandem.checkpoint``'s.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tandem.checkpoint import (
    capture_rng,
    download,
    latest,
    read_state,
    read_tensors,
    restore_rng,
    staging,
    write_state,
    write_tensors,
)
from tandem.checkpoint.directory import STAGING_PREFIX
from tandem.errors import CheckpointError
from tandem.train.optim import export_optimizer, import_optimizer

if TYPE_CHECKING:
    from tandem.train.engine import TrainEngine

log = logging.getLogger(__name__)

FORMAT = 1
MODEL, OPTIMIZER, RNG, STATE = (
    "model.safetensors",
    "optimizer.safetensors",
    "rng.safetensors",
    "engine.json",
)


def is_inside_staging(path: Path) -> bool:
    """Whether a run's staging, which commits the checkpoint, is being written around ``path``."""
    return any(part.startswith(STAGING_PREFIX) for part in path.absolute().parts)


def holds_state(path: Path) -> bool:
    return (path / STATE).is_file()


def write_training_state(engine: TrainEngine, path: Path) -> None:
    """Write everything that training changes: weights, optimizer, schedule, RNG, version."""
    path.mkdir(parents=True, exist_ok=True)
    rng_tensors, rng_state = capture_rng()
    write_tensors(path / MODEL, _full(engine, engine.trainable_tensors()))
    optimizer = export_optimizer(engine.optimizer, engine.parameters())
    write_tensors(path / OPTIMIZER, _full(engine, optimizer))
    write_tensors(path / RNG, rng_tensors)
    write_state(
        path / STATE,
        {
            "format": FORMAT,
            "counters": engine.counters(),
            "rng": rng_state,
            "config_hash": config_hash(engine),
        },
    )


def read_training_state(engine: TrainEngine, path: Path) -> None:
    """The inverse of ``write_training_state``; everything is read before anything is changed.

    Raises:
        CheckpointError: a file is missing, damaged, of another format, or of another model.
    """
    state = read_state(path / STATE)
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{path / STATE}: format {state.get('format')!r}, allowed: {FORMAT}")
    if state["config_hash"] != config_hash(engine):
        log.warning("%s was written under another train configuration; going on", path)
    rng_tensors, optimizer = read_tensors(path / RNG), read_tensors(path / OPTIMIZER)
    own, found = engine.trainable_tensors(), read_tensors(path / MODEL)
    _check_same(path / MODEL, own, found)
    for name, tensor in own.items():
        engine._copy_full(tensor, found[name])
    import_optimizer(engine.optimizer, engine.parameters(), optimizer)
    engine.restore_counters(state["counters"])
    restore_rng(rng_tensors, state["rng"])


def save_checkpoint(
    engine: TrainEngine, path: Path, url: str | None, step: int, keep: int | None
) -> None:
    """Files only inside a run's staging, else a whole checkpoint of its own."""
    if is_inside_staging(path):
        write_training_state(engine, path)
        return
    with staging(path, step, keep=keep, upload_url=url) as target:
        write_training_state(engine, target.path)


def load_checkpoint(
    engine: TrainEngine, path: Path, url: str | None, delete_download: bool
) -> None:
    """From the files at ``path``, the newest checkpoint of the run ``path``, or a download."""
    if url is not None:
        downloaded = download(url, path).path
        try:
            read_training_state(engine, downloaded)
        finally:
            if delete_download:
                shutil.rmtree(downloaded)
        return
    if not holds_state(path):
        found = latest(path)
        if found is None:
            raise CheckpointError(f"{str(path)!r} has no checkpoint")
        path = found.path
    read_training_state(engine, path)


def config_hash(engine: TrainEngine) -> str:
    """Digest of the train, adapter and model configuration."""
    parts: list[Any] = [
        engine.config.model_dump(mode="json"),
        None if engine.lora is None else engine.lora.model_dump(mode="json"),
        engine.model.config.to_dict(),
    ]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _full(engine: TrainEngine, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: engine._full_tensor(tensor) for name, tensor in tensors.items()}


def _check_same(file: Path, own: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    problems = [f"{name} is missing" for name in sorted(own.keys() - found.keys())]
    problems += [f"{name} is unexpected" for name in sorted(found.keys() - own.keys())]
    problems += [
        f"{name} is {found[name].dtype} {list(found[name].shape)}, expected {own[name].dtype} "
        f"{list(own[name].shape)}"
        for name in sorted(own.keys() & found.keys())
        if own[name].shape != found[name].shape or own[name].dtype != found[name].dtype
    ]
    first: dict[int, str] = {}
    for name in own.keys() & found.keys():
        twin = first.setdefault(own[name].data_ptr(), name)
        if own[name].numel() and found[name] is not found[twin]:
            problems.append(f"{name} and {twin} are tied in this model but not in the file")
    if problems:
        raise CheckpointError(f"{file} is not of this model: {'; '.join(problems)}")
