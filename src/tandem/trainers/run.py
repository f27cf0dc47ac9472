"""One start of a run: its directory, incarnation, log, metrics, threads and stop signal.

What a particular trainer does between two steps does not belong here.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import torch
import yaml

from tandem.checkpoint import BackgroundWriter, CheckpointDir, check_store, latest, supersede_newer
from tandem.config import Root, TrainConfig, load_config, to_yaml
from tandem.config.launcher import launcher_facts
from tandem.config.resume import check_resume
from tandem.errors import CapabilityError, ConfigError, Preempted
from tandem.files import write_durably
from tandem.launch import current_leader
from tandem.observe import MetricsLogger, setup_logging
from tandem.observe.metrics import METRICS_FILE
from tandem.train.registry import check_device

log = logging.getLogger(__name__)


class StopSignal:
    """SIGTERM or SIGINT asks for a stop at the next step border; a second one stops at once.

    ``fail`` raises an error in the thread that waits for these signals, whatever it waits for.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._failure: BaseException | None = None
        self._thread: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
            self._thread = threading.get_ident()
        except ValueError:  # only the main thread may install handlers; others cannot be signalled
            self._previous.clear()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread = None
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def fail(self, error: BaseException) -> None:
        """Called from another thread."""
        self._failure = error
        if self._thread is not None:
            signal.pthread_kill(self._thread, signal.SIGINT)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._failure is not None:
            error, self._failure = self._failure, None
            raise error
        if self.requested is not None:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number).name


@dataclass
class Run:
    """What every trainer of this start shares; a resumed run goes on from ``checkpoint``."""

    config: Root
    dir: Path
    incarnation: str
    metrics: MetricsLogger
    stop: StopSignal
    checkpoint: CheckpointDir | None = None
    writer: BackgroundWriter | None = None
    """Finishes checkpoints beside the training; None: they are written before it goes on."""
    started: float = field(default_factory=time.monotonic)

    def elapsed_s(self) -> float:
        """Wall time of this start and of those before it, up to their last checkpoints."""
        earlier = self.checkpoint.extra["wall_s"] if self.checkpoint else 0.0
        return float(earlier) + time.monotonic() - self.started

    def wait_for_checkpoint(self) -> None:
        """Until the last checkpoint is on disk.

        Raises:
            CheckpointError: it could not be written.
        """
        if self.writer is not None:
            self.writer.wait()

    def end_stopped(self) -> NoReturn:
        """Raise ``Preempted``. Call it when a stop was asked for *and* the state saved since: a
        signal that came after the question is for the next step border."""
        self.wait_for_checkpoint()
        raise Preempted(
            f"stopped by {self.stop.requested}; the state is saved, go on with --resume "
            f"(run directory: {self.dir})"
        )


@contextmanager
def open_run(config: Root, *, resume: bool) -> Iterator[Run]:
    """Open the run directory of ``config`` for a new run or, with ``resume``, for one that exists.

    Raises:
        ConfigError: the directory holds a run and ``resume`` is off, or the reverse, or a key was
            changed that may not change on resume.
        CheckpointError: checkpoints exist and none can be trusted.
        CapabilityError: a launcher started several ranks and this one does not lead them.
    """
    _check_led()
    _check_machine(config)
    directory = Path(config.run.output_dir) / config.run.name
    config_file = directory / "config.yaml"
    if resume:
        _check_same_run(config, config_file)
    elif config_file.exists() and _has_begun(directory):
        raise ConfigError(
            f"run.name: {str(directory)!r} already holds a run; continue it with --resume, or "
            "choose another name with run.name=NAME"
        )
    _make_writable(directory)
    with exclusive(directory), setup_logging(directory):
        if not resume:
            # Left by a start that failed before its first step, maybe with another seed.
            shutil.rmtree(directory / "initial_model", ignore_errors=True)
            write_durably(config_file, to_yaml(config))
        incarnation = _new_incarnation(directory)
        checkpoint = latest(directory) if resume else None
        step = 0
        if checkpoint is not None:
            step = checkpoint.step
            supersede_newer(directory, step)
        set_threads(config)
        metrics = MetricsLogger(
            directory,
            trackers=config.tracking.trackers,
            project=config.tracking.project,
            run_name=config.run.name,
            resume_step=step + 1 if checkpoint else 0,
        )
        with ExitStack() as stack:
            stack.callback(metrics.close)
            stop = stack.enter_context(StopSignal())
            leader = current_leader()
            if leader is not None:
                leader.stop = stop
            writer = None
            if config.checkpoint.background:
                writer = stack.enter_context(BackgroundWriter())
            yield Run(config, directory, incarnation, metrics, stop, checkpoint, writer)


def _check_led() -> None:
    """Ranks that nobody leads would each train on all rows and write the same run directory."""
    world_size = launcher_facts().world_size
    if world_size > 1 and current_leader() is None:
        raise CapabilityError(
            f"WORLD_SIZE: got {world_size}, allowed here: 1; run_sft, run_dpo, run_reward and "
            "run_rl take several ranks, this does not"
        )


def _check_machine(config: Root) -> None:
    """What this machine lacks is said before anything is written or trained."""
    for name, section in config:
        for key, train in ((name, section), (f"{name}.train", getattr(section, "train", None))):
            if isinstance(train, TrainConfig):
                check_device(train.device, f"{key}.device")
    inference, cores = getattr(config, "inference", None), os.cpu_count() or 1
    if inference is not None and inference.threads > cores:
        raise ConfigError(
            f"inference.threads: got {inference.threads}, allowed here: 1 to {cores}, the cores of "
            "this machine"
        )
    if config.checkpoint.upload_url is not None:
        check_store(config.checkpoint.upload_url)


def _make_writable(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / ".lock").touch()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ConfigError(
            f"run.output_dir: cannot write to {str(directory)!r} ({error.strerror}); set it to a "
            "directory that you may write to"
        ) from None


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Hold the run directory's lock; the operating system frees it when the process dies."""
    import fcntl

    with (directory / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"run directory {str(directory)!r} is in use by another process; wait for it to end"
            ) from None
        yield


def set_threads(config: Root) -> None:
    """Give torch this rank's share of the cores that the generator does not use; see
    ``run.threads``."""
    threads = config.run.threads
    if threads is None:
        inference = getattr(config, "inference", None)
        taken = inference.threads if inference and inference.mode == "process" else 0
        free = len(os.sched_getaffinity(0)) - taken
        threads = max(1, free // launcher_facts().local_world_size)
    torch.set_num_threads(threads)


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch, whose state checkpoints keep."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _check_same_run(config: Root, config_file: Path) -> None:
    if not config_file.exists():
        raise ConfigError(
            f"--resume: {str(config_file.parent)!r} holds no run; start it without --resume"
        )
    try:
        stored: Mapping[str, Any] = yaml.safe_load(config_file.read_text(encoding="utf-8"))
        before = load_config(stored)
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, ConfigError) as error:
        raise ConfigError(
            f"--resume: {str(config_file)!r} is damaged ({str(error).splitlines()[0]}); write it "
            "anew from the configuration of the run: the same command with --dry-run prints it"
        ) from None
    check_resume(before, config)


def _has_begun(directory: Path) -> bool:
    """Whether a run recorded or saved anything; a start that failed before may be repeated."""
    stages = (directory, directory / "warmup")
    records = [stage / METRICS_FILE for stage in stages]
    saved = any(any(stage.glob("checkpoints/step_*")) for stage in stages)
    return saved or any(path.exists() and path.stat().st_size > 0 for path in records)


def _new_incarnation(directory: Path) -> str:
    incarnation = uuid.uuid4().hex[:12]
    write_durably(directory / "incarnation", incarnation)
    return incarnation
