"""Several ranks for a test: one start of processes, many checks in each.

A check is a function of a ``Rank``; its outcome is that of all ranks together. What the checks are
is in ``checks_fsdp``.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import multiprocessing
import os
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

COLLECTIVE_TIMEOUT_S = 60.0
DEADLINE_S = 600.0
PRELOADED = ("tandem.train.fsdp", "tandem.train.local", "tests.train.checks_fsdp")


@dataclass
class Rank:
    """One of the processes of a check."""

    rank: int
    world: int
    folder: Path
    models: dict[str, str]
    _made: list[Any] = field(default_factory=list)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def engine(self, model: str = "plain", *, parallel: Any = None, **options):
        from tandem.config.schema import ParallelConfig

        layout = {"timeout_s": COLLECTIVE_TIMEOUT_S} | (parallel or {})
        return self.local(model, backend="fsdp", parallel=ParallelConfig(**layout), **options)

    def local(
        self,
        model: str = "plain",
        *,
        lora: Any = None,
        model_type: str = "language_model",
        backend: str = "local",
        **options,
    ):
        from tandem.config.schema import TrainConfig
        from tandem.train import EngineRegistry
        from tandem.types import FinetuneSpec

        options = {"device": "cpu", "max_grad_norm": None, "lr": 1e-3} | options
        engine = EngineRegistry.new(
            model_type,
            backend,
            config=TrainConfig(backend=backend, **options),
            model_path=self.models.get(model, model),
            lora=lora,
        )
        self._made.append(engine)
        engine.initialize(ft_spec=FinetuneSpec(1, 100, 1))
        return engine

    def close(self) -> None:
        while self._made:
            self._made.pop().destroy()


def run_checks(
    world: int, checks: list[Callable[[Rank], None]], folder: Path, models: dict[str, str]
) -> dict[str, str | None]:
    """The error of each check by its name, None where all ranks passed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    names = [(check.__module__, check.__name__) for check in checks]
    port = _free_port()
    processes = [
        context.Process(target=_rank_main, args=(rank, world, port, names, str(folder), models))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + DEADLINE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    return {name: _outcome(folder, name, world) for _, name in names}


def _outcome(folder: Path, name: str, world: int) -> str | None:
    problems = []
    for rank in range(world):
        file = folder / f"{name}.{rank}.json"
        error = json.loads(file.read_text()) if file.is_file() else "did not finish"
        if error is not None:
            problems.append(f"rank {rank}: {error}")
    return "\n".join(problems) or None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _rank_main(
    rank: int,
    world: int,
    port: int,
    names: list[tuple[str, str]],
    folder: str,
    models: dict[str, str],
) -> None:
    import torch
    import torch.distributed as dist

    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(Path(folder) / f"output.{rank}.txt", "w")  # noqa: SIM115
    faulthandler.enable(sys.stderr)
    meeting = dist.FileStore(f"{folder}/meeting", world)
    meeting.set_timeout(timedelta(seconds=2 * COLLECTIVE_TIMEOUT_S))
    for module, name in names:
        here = Rank(rank, world, Path(folder), models)
        error: str | None = None
        torch.manual_seed(0)
        try:
            getattr(importlib.import_module(module), name)(here)
        except BaseException:
            error = traceback.format_exc()
        here.close()
        (Path(folder) / f"{name}.{rank}.json").write_text(json.dumps(error))
        meeting.set(f"{name}/{rank}", "done")
        meeting.wait([f"{name}/{other}" for other in range(world)])
