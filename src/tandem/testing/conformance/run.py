"""Run the checks on a backend: here for one rank, through ``world`` for several.

``run`` is the one call for third parties. Checks are in ``table``, printing in ``report``.
"""

from __future__ import annotations

import importlib
import math
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.config.load import validate
from tandem.config.schema import TrainConfig
from tandem.errors import ConfigError
from tandem.testing.conformance.bench import Bench
from tandem.testing.conformance.figure import NotApplicable, Outcome
from tandem.testing.conformance.subject import OUTPUT, TOLERANCES, Subject
from tandem.testing.conformance.table import CHECKS
from tandem.testing.conformance.world import Job, run_ranks
from tandem.train.registry import EngineRegistry, detect_device

AXES = ("tensor", "sequence", "replicate")

OnOutcome = Callable[[Outcome], None]


@dataclass(frozen=True, slots=True)
class Report:
    """All outcomes on one subject, in the order of the table."""

    subject: Subject
    outcomes: tuple[Outcome, ...]

    @property
    def passed(self) -> bool:
        return not self.failed

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.verdict == "fail"]

    def __getitem__(self, check: str) -> Outcome:
        return next(outcome for outcome in self.outcomes if outcome.check == check)


def run(
    backend: str,
    *,
    model_type: str = "language_model",
    world: int = 1,
    lora: bool = False,
    dtype: str = "float32",
    device: str | None = None,
    train: Mapping[str, Any] | None = None,
    checks: Sequence[str] | None = None,
    modules: Sequence[str] = (),
    timeout_s: float = 120.0,
    on_outcome: OnOutcome | None = None,
) -> Report:
    """Check the train engine registered as ``backend`` against the kit's tables.

    ``train`` changes keys of ``TrainConfig`` (``{"parallel": {"tensor": 2}}``); ``checks`` None
    runs all; ``modules`` are imported first, in every rank, to register engines that no entry point
    of ``tandem.train_engines`` registers. With ``world`` > 1 the ranks are processes of their own,
    and ``timeout_s`` is how long one check may take there. ``on_outcome`` gets each outcome as it
    is known.

    Raises:
        ConfigError: an unknown backend, check, module or option.
        EngineError: the ranks do not start.
    """
    subject = make_subject(
        backend,
        model_type=model_type,
        world=world,
        lora=lora,
        dtype=dtype,
        device=device,
        train=train,
    )
    names = _check_names(checks)
    _import(modules)
    EngineRegistry.get_engine_cls(subject.model_type, subject.backend, subject.device)
    with tempfile.TemporaryDirectory(prefix="tandem-conformance-") as scratch:
        if world == 1:
            outcomes = run_here(subject, names, Path(scratch), on_outcome)
        else:
            job = Job([(subject, name) for name in names], tuple(modules), timeout_s)
            outcomes = run_ranks(job, Path(scratch), on_outcome)
    return Report(subject, tuple(outcomes))


def make_subject(
    backend: str,
    *,
    model_type: str,
    world: int,
    lora: bool,
    dtype: str,
    device: str | None,
    train: Mapping[str, Any] | None,
) -> Subject:
    """A subject whose options were checked.

    Raises:
        ConfigError: one of them is not allowed.
    """
    for field, value, allowed in (("model_type", model_type, OUTPUT), ("dtype", dtype, TOLERANCES)):
        if value not in allowed:
            raise ConfigError(f"{field}: got {value!r}, allowed: {', '.join(allowed)}")
    if world < 1:
        raise ConfigError(f"world: got {world}, allowed: an integer >= 1")
    found = device or detect_device()
    validate(TrainConfig, {"backend": backend, "device": found, "dtype": dtype, **(train or {})})
    parallel = (train or {}).get("parallel", {})
    degrees = {axis: parallel.get(axis, 1) for axis in AXES}
    if world % math.prod(degrees.values()):
        named = ", ".join(f"{axis} {degree}" for axis, degree in degrees.items())
        raise ConfigError(f"world: got {world}, allowed: a multiple of its axes ({named})")
    return Subject(backend, model_type, world, lora, dtype, found, dict(train or {}))  # type: ignore[arg-type]


def run_here(
    subject: Subject, names: Sequence[str], scratch: Path, on_outcome: OnOutcome | None = None
) -> list[Outcome]:
    """Run checks in this process."""
    bench = Bench(subject, scratch)
    bench.write_models()
    outcomes = []
    for name in names:
        outcomes.append(run_check(bench, name))
        if on_outcome is not None:
            on_outcome(outcomes[-1])
    return outcomes


def run_check(bench: Bench, name: str) -> Outcome:
    """One check; whatever it raises is its outcome."""
    try:
        return Outcome.measured(name, CHECKS[name](bench))
    except NotApplicable as reason:
        return Outcome.skipped(name, str(reason))
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return Outcome.raised(name, f"{type(error).__name__}: {first}", traceback.format_exc())


def _check_names(checks: Sequence[str] | None) -> list[str]:
    if checks is None:
        return list(CHECKS)
    if unknown := [name for name in checks if name not in CHECKS]:
        raise ConfigError(f"check: got {unknown[0]!r}, allowed: {'; '.join(CHECKS)}")
    return [name for name in CHECKS if name in checks]


def _import(modules: Sequence[str]) -> None:
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(f"module {name!r} cannot be imported: {error}") from error
