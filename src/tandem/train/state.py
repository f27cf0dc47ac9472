"""The training state of an engine as files: what a resume needs to go on bit for bit.

Atomicity, manifests and retention are ``tandem.checkpoint``'s.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
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
    has_same_train_config,
    identity_problems,
    tensor_problems,
)
from tandem.train.optim import (
    export_optimizer,
    import_optimizer,
    optimizer_entries,
    optimizer_problems,
)
from tandem.train.ranks import from_first_rank, on_first_rank, opened_by_first_rank

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


def write_training_state(engine: TrainEngine, path: Path | None) -> None:
    """Write everything that training changes: weights, optimizer, schedule, RNG, version.

    All ranks must call; the first one writes, and the others may pass None. Tensors are written
    whole, by name, so that any number of ranks can read them.
    """
    rng = engine._gather_over_all(capture_rng())
    weights = whole_tensors(engine, engine.trainable_tensors())
    on_first_rank(engine, lambda: _write_weights(path, weights))
    weights.clear()
    optimizer = whole_tensors(engine, export_optimizer(engine.optimizer, engine.parameters()))

    def write() -> None:
        assert path is not None
        write_tensors(path / OPTIMIZER, optimizer)
        write_tensors(path / RNG, _by_rank([tensors for tensors, _ in rng]))
        write_state(
            path / STATE,
            {
                "format": FORMAT,
                "counters": engine.counters(),
                "rng": [state for _, state in rng],
                "identity": engine.identity,
            },
        )

    on_first_rank(engine, write)


def read_training_state(engine: TrainEngine, path: Path) -> None:
    """The inverse of ``write_training_state``; all is read and checked before anything is changed.

    With another number of ranks the random generators of the saved ranks are dealt out in turn.

    Raises:
        CheckpointError: a file is missing, damaged or of another format, or the state is of another
            engine; everything that differs is listed.
    """
    own = engine.trainable_tensors()
    saved = on_first_rank(engine, lambda: _read(engine, path, own))
    header = from_first_rank(engine, None if saved is None else saved.header)
    copy_from_first_rank(engine, own, None if saved is None else saved.weights)
    import_optimizer(
        engine.optimizer,
        engine.parameters(),
        header.optimizer,
        lambda into, key: engine._copy_full(into, None if saved is None else saved.optimizer[key]),
    )
    engine.restore_counters(header.counters)
    rank = engine.rank % len(header.rng)
    restore_rng(*header.rng[rank])


@dataclass(frozen=True, slots=True)
class _Header:
    """What every rank needs to know of a saved state."""

    counters: dict[str, Any]
    optimizer: dict[str, tuple[torch.dtype, bool]]
    rng: list[tuple[dict[str, Tensor], Any]]


@dataclass(frozen=True, slots=True)
class _Saved:
    """A saved state as its one reader holds it."""

    header: _Header
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def _write_weights(path: Path | None, weights: Mapping[str, Tensor]) -> None:
    assert path is not None
    path.mkdir(parents=True, exist_ok=True)
    write_tensors(path / MODEL, weights)


def _read(engine: TrainEngine, path: Path, own: Mapping[str, Tensor]) -> _Saved:
    if not holds_state(path):
        raise CheckpointError(f"{str(path)!r} has no training state; save it with with_optim=True")
    state = read_state(path / STATE)
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{path / STATE}: format {state.get('format')!r}, allowed: {FORMAT}")
    rng_tensors, optimizer = read_tensors(path / RNG), read_tensors(path / OPTIMIZER)
    weights = read_tensors(path / MODEL)
    problems = [
        *identity_problems(engine, state["identity"]),
        *tensor_problems(own, weights),
        *optimizer_problems(engine.parameters(), optimizer),
    ]
    if problems:
        raise CheckpointError(
            f"{path} is a checkpoint of something else: {'; '.join(problems)}. Nothing was "
            "changed; load it with the model, adapter and tokenizer that it was written with"
        )
    if not has_same_train_config(engine, state["identity"]):
        log.warning("%s was written under another train configuration; going on", path)
    header = _Header(
        counters=state["counters"],
        optimizer=optimizer_entries(optimizer),
        rng=[(_of_rank(rng_tensors, rank), rng) for rank, rng in enumerate(state["rng"])],
    )
    return _Saved(header, weights, optimizer)


def _by_rank(found: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {
        f"rank_{rank}.{name}": tensor
        for rank, tensors in enumerate(found)
        for name, tensor in tensors.items()
    }


def _of_rank(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    prefix = f"rank_{rank}."
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def save_checkpoint(
    engine: TrainEngine, path: Path, url: str | None, step: int, keep: int | None
) -> None:
    """Files only inside a run's staging, else a whole checkpoint of its own."""
    if from_first_rank(engine, is_inside_staging(path)):
        if url is not None or keep is not None:
            raise ConfigError(
                f"hdfs_path, max_ckpt_to_keep: got {url!r}, {keep!r}, allowed inside a staging: "
                "None; the whole checkpoint is kept and copied by staging(keep=, upload_url=)"
            )
        write_training_state(engine, path)
        return
    with opened_by_first_rank(
        engine, lambda: staging(path, step, keep=keep, upload_url=url)
    ) as target:
        write_training_state(engine, None if target is None else target.path)


def load_checkpoint(
    engine: TrainEngine, path: Path, url: str | None, delete_download: bool
) -> None:
    """From the files at ``path``, the newest checkpoint of the run ``path``, or a download."""
    if url is not None:
        downloaded = on_first_rank(engine, lambda: download(url, path).path)
        try:
            read_training_state(engine, downloaded or path)
        finally:
            if delete_download and downloaded is not None:
                shutil.rmtree(downloaded)
        return
    found = on_first_rank(engine, lambda: _find(path))
    read_training_state(engine, found or path)


def _find(path: Path) -> Path:
    if holds_state(path):
        return path
    found = latest(path)
    if found is None:
        raise CheckpointError(f"{str(path)!r} has no checkpoint")
    return found.path


def whole_tensors(engine: TrainEngine, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors on the host of the first rank; empty on the others, who must call too.

    What is one tensor under two names stays one.
    """
    made: dict[int, Tensor] = {}
    for identity, tensor in {id(tensor): tensor for tensor in tensors.values()}.items():
        whole = engine._full_tensor(tensor.detach())
        if engine.is_first_rank:
            made[identity] = whole.cpu()
    if not engine.is_first_rank:
        return {}
    return {name: made[id(tensor)] for name, tensor in tensors.items()}


def copy_from_first_rank(
    engine: TrainEngine, into: Mapping[str, Tensor], source: Mapping[str, Tensor] | None
) -> None:
    """Copy whole tensors, which only the first rank has, into possibly sharded ones by name."""
    for name, tensor in into.items():
        engine._copy_full(tensor, None if source is None else source[name])
