"""The training state of an engine as files: what a resume needs to go on bit for bit.

Atomicity, manifests and retention are ``tandem.checkpoint``'s.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

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
from tandem.errors import CheckpointError, ConfigError
from tandem.train.identity import (
    describe,
    has_same_train_config,
    identity_problems,
    tensor_problems,
)
from tandem.train.optim import export_optimizer, import_optimizer, optimizer_problems

if TYPE_CHECKING:
    from tandem.train.engine import TrainEngine

log = logging.getLogger(__name__)

FORMAT = 2
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
            "identity": describe(engine),
        },
    )


def read_training_state(engine: TrainEngine, path: Path) -> None:
    """The inverse of ``write_training_state``; all is read and checked before anything is changed.

    Raises:
        CheckpointError: a file is missing, damaged or of another format, or the state is of another
            engine; everything that differs is listed.
    """
    state = read_state(path / STATE)
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{path / STATE}: format {state.get('format')!r}, allowed: {FORMAT}")
    rng_tensors, optimizer = read_tensors(path / RNG), read_tensors(path / OPTIMIZER)
    own, found = engine.trainable_tensors(), read_tensors(path / MODEL)
    problems = [
        *identity_problems(engine, state["identity"]),
        *tensor_problems(own, found),
        *optimizer_problems(engine.parameters(), optimizer),
    ]
    if problems:
        raise CheckpointError(
            f"{path} is a checkpoint of something else: {'; '.join(problems)}. Nothing was "
            "changed; load it with the model, adapter and tokenizer that it was written with"
        )
    if not has_same_train_config(engine, state["identity"]):
        log.warning("%s was written under another train configuration; going on", path)
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
        if url is not None or keep is not None:
            raise ConfigError(
                f"hdfs_path, max_ckpt_to_keep: got {url!r}, {keep!r}, allowed inside a staging: "
                "None; the whole checkpoint is kept and copied by staging(keep=, upload_url=)"
            )
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


def _full(engine: TrainEngine, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: engine._full_tensor(tensor) for name, tensor in tensors.items()}
