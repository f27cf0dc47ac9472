"""Whether generation and training overlap: an asynchronous step beside each of its sides alone.

    python benchmarks/overlap.py --rounds 3 --steps 20 --json overlap.json
    python benchmarks/overlap.py --steps 5 --set rollout.batch_size=64 algorithm.epochs=2

The pieces are those of a run of the quickstart recipe, opened as the run opens them: executor,
rewards, store, metrics, publication. The generator's process is pinned to one core, everything else
to another. Rounds of three phases take turns: the asynchronous loop; generation alone (batches are
taken and the same weights published, nothing is learnt); training alone (learn, publish, record on
kept batches while the generator rests). Then the synchronous loop on the same two cores, unpinned,
with one and with two threads for each side. The learning rate is 0, so that all phases do the same
work: the weights, and so the lengths of answers, stay as the warm-up left them.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from machine import parser, report
from tensordict import TensorDict

from tandem.config import RLConfig, load_config, resolve_recipe
from tandem.models.loading import resolve_model
from tandem.trainers.rl import RLSession, open_session, open_task
from tandem.trainers.run import open_run
from tandem.trainers.sft import run_stage

GOAL_RATIO, GOAL_IDLE, GOAL_BALANCE = 1.05, 0.05, 0.2
WARM_UP = 4
"""Steps of a phase before it is timed: enough for the episodes of the phase before to be gone."""
NUM_KEPT = 8
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
FIXED = ("train.lr=0", "run.threads=1", "inference.mode=process", "inference.threads=1")
QUIET = ("eval.data=null", "checkpoint.every=0", "tracking.progress=false")
Row = dict[str, float]


# --- processes and cores --------------------------------------------------------------------------


def threads_of(pid: int) -> list[int]:
    return [int(entry) for entry in os.listdir(f"/proc/{pid}/task")]


def pin(pids: list[int], cores: set[int]) -> None:
    """Every thread there is; those to come inherit it from the thread that starts them."""
    for pid in pids:
        for thread in threads_of(pid):
            os.sched_setaffinity(thread, cores)


def descendants(pid: int) -> list[int]:
    """Children of every thread of ``pid``, and theirs."""
    found = []
    for thread in threads_of(pid):
        listed = Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
        for child in map(int, listed):
            found += [child, *descendants(child)]
    return found


def processor_s(pids: list[int]) -> float:
    """User and system time of whole processes, in steps of the kernel's tick."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS_PER_S


@dataclass
class Sides:
    """The processes of a session: the generator's, and all others."""

    generator: list[int]
    trainer: list[int]

    @classmethod
    def of(cls, session: RLSession) -> Sides:
        pid = int(session.rollout.backend.stats()["pid"])
        generator = [pid, *descendants(pid)]
        own = os.getpid()
        return cls(generator, [own, *(p for p in descendants(own) if p not in generator)])


# --- phases ---------------------------------------------------------------------------------------


def timed(sides: Sides, steps: int, step: Callable[[], None]) -> Row:
    """Wall time of a step, and of the processors that the two sides had, in milliseconds."""
    for _ in range(WARM_UP):
        step()
    before = processor_s(sides.trainer), processor_s(sides.generator)
    started = time.perf_counter()
    for _ in range(steps):
        step()
    wall_s = time.perf_counter() - started
    trainer_s = processor_s(sides.trainer) - before[0]
    generator_s = processor_s(sides.generator) - before[1]
    return {
        "wall_ms": 1e3 * wall_s / steps,
        "trainer_cpu_ms": 1e3 * trainer_s / steps,
        "generator_cpu_ms": 1e3 * generator_s / steps,
    }


@dataclass
class Phases:
    """What is timed in one session."""

    session: RLSession
    steps: int
    laps: list[Mapping[str, float]] = field(default_factory=list)
    kept: deque[TensorDict] = field(default_factory=lambda: deque(maxlen=NUM_KEPT))

    def __post_init__(self) -> None:
        self.session.publish(self.session.learner.policy.get_version())
        self.sides = Sides.of(self.session)

    def pin(self, trainer: set[int], generator: set[int]) -> None:
        # The generator's threads were started with the affinity of this process.
        pin(self.sides.trainer, trainer)
        pin(self.sides.generator, generator)

    def loop(self) -> Row:
        """The loop of a run."""

        def step() -> None:
            metrics = self.session.step()
            self.session.record(metrics)
            laps.append(metrics)

        laps: list[Mapping[str, float]] = []
        row = timed(self.sides, self.steps, step)
        self.laps += laps[WARM_UP:]
        return row

    def generation(self) -> Row:
        session = self.session

        def step() -> None:
            self.kept.append(session.next_batch())
            session.publish(session.learner.policy.get_version() + 1)

        return timed(self.sides, self.steps, step)

    def training(self) -> Row:
        def step() -> None:
            self.kept.rotate()
            self.session.train_on(self.kept[0])

        with self._generator_at_rest():
            return timed(self.sides, self.steps, step)

    @contextmanager
    def _generator_at_rest(self) -> Iterator[None]:
        rollout = self.session.rollout
        rollout.pause()
        while rollout.snapshot().num_running:
            time.sleep(0.01)
        yield
        rollout.resume()


# --- sessions -------------------------------------------------------------------------------------


@dataclass
class Bench:
    folder: Path
    overrides: list[str]
    steps: int
    rounds: int
    model_path: str = ""

    def config(self, name: str, *more: str) -> RLConfig:
        own = [f"run.name={name}", f"run.output_dir={self.folder}", "steps=1000000"]
        changes = [*FIXED, *QUIET, *self.overrides, *own, *more]
        config = load_config(resolve_recipe("quickstart"), changes)
        assert isinstance(config, RLConfig)
        return config

    def warm_up(self) -> None:
        """The model that the recipe's reinforcement learning starts from."""
        config = self.config("warmup")
        with open_run(config, resume=False) as run:
            path = resolve_model(config.model, seed=config.run.seed, workdir=run.dir)
            assert config.warmup is not None
            self.model_path = run_stage(config.warmup, path, run, run.dir / "warmup")

    @contextmanager
    def session(self, config: RLConfig) -> Iterator[Phases]:
        with open_run(config, resume=False) as run:
            task = open_task(config, self.model_path)
            with open_session(task, run, self.model_path) as session:
                yield Phases(session, self.steps)

    def asynchronous(self, cores: list[int]) -> dict[str, Any]:
        """Three phases, taking turns on their own cores."""
        found: dict[str, list[Row]] = {"asynchronous": [], "generation": [], "training": []}
        trainer_core, generator_core = cores
        with self.session(self.config("asynchronous")) as phases:
            phases.pin({trainer_core}, {generator_core})
            for _ in range(self.rounds):
                found["asynchronous"].append(phases.loop())
                found["generation"].append(phases.generation())
                found["training"].append(phases.training())
                say(
                    f"{found['asynchronous'][-1]} {found['generation'][-1]} {found['training'][-1]}"
                )
            laps = phases.laps
        figures: dict[str, Any] = {name: mean_of(rows) for name, rows in found.items()}
        names = [name for name in laps[-1] if name.startswith("timing_s/") or "share" in name]
        figures["laps"] = {name: statistics.mean(lap[name] for lap in laps) for name in names}
        figures["rounds"] = found
        return figures

    def synchronous(self, threads: int, cores: list[int]) -> Row:
        pin([os.getpid()], set(cores))
        config = self.config(
            f"synchronous-{threads}",
            "rollout.max_staleness=0",
            f"run.threads={threads}",
            f"inference.threads={threads}",
        )
        with self.session(config) as phases:
            rows = [phases.loop() for _ in range(self.rounds)]
        say(f"synchronous, {threads} threads: {rows}")
        return mean_of(rows)


def mean_of(rows: list[Row]) -> Row:
    return {name: statistics.mean(row[name] for row in rows) for name in rows[0]}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- what it comes to -----------------------------------------------------------------------------


def conclude(found: dict[str, Any], synchronous: dict[str, Row]) -> Row:
    """The figures of the goal."""
    step = found["asynchronous"]
    generation_ms, training_ms = found["generation"]["wall_ms"], found["training"]["wall_ms"]
    figures = {
        "generation_ms": generation_ms,
        "training_ms": training_ms,
        "balance": training_ms / generation_ms,
        "asynchronous_ms": step["wall_ms"],
        "of_longer_side": step["wall_ms"] / max(generation_ms, training_ms),
        "trainer_core_idle": 1 - step["trainer_cpu_ms"] / step["wall_ms"],
        "generator_core_idle": 1 - step["generator_cpu_ms"] / step["wall_ms"],
    }
    if synchronous:
        sync_ms = min(row["wall_ms"] for row in synchronous.values())
        figures |= {"synchronous_ms": sync_ms, "speed_up": sync_ms / step["wall_ms"]}
    return figures


def table(result: Row) -> str:
    goals = {
        "balance": f"within {GOAL_BALANCE:.0%}",
        "of_longer_side": f"at most {GOAL_RATIO}",
        "trainer_core_idle": f"at most {GOAL_IDLE:.0%}",
        "generator_core_idle": f"at most {GOAL_IDLE:.0%}",
    }
    lines = [f"{'figure':<22}{'value':>10}  goal"]
    for name, value in result.items():
        shown = f"{value:.1f}" if name.endswith("_ms") else f"{value:.3f}"
        lines.append(f"{name:<22}{shown:>10}  {goals.get(name, '')}".rstrip())
    return "\n".join(lines)


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(child) for name, child in value.items()}
    if isinstance(value, list):
        return [rounded(child) for child in value]
    return round(value, 4) if isinstance(value, float) else value


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=20, help="timed steps of a phase and round")
    arguments.add_argument("--cores", type=int, nargs=2, help="trainer's, generator's")
    arguments.add_argument("--set", nargs="*", default=[], help="section.key=value overrides")
    arguments.add_argument("--threads", type=int, nargs="*", default=[1, 2], help="synchronous")
    arguments.add_argument("--model", help="a warmed-up model instead of warming one up")
    options = arguments.parse_args()
    allowed = os.sched_getaffinity(0)
    cores = options.cores or sorted(allowed)[:2]
    if len(cores) < 2:
        arguments.error(f"two cores are needed, this process may use {cores}")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch, redirect_stdout(sys.stderr):
        bench = Bench(Path(scratch), options.set, options.steps, options.rounds)
        bench.model_path = options.model or ""
        if not options.model:
            bench.warm_up()
        found = bench.asynchronous(cores)
        synchronous = {
            f"threads_{threads}": bench.synchronous(threads, cores) for threads in options.threads
        }
    pin([os.getpid()], allowed)
    result = conclude(found, synchronous)
    say(table(result))
    report(
        rounded({"overrides": options.set, "result": result, "synchronous": synchronous, **found}),
        options.json,
    )


if __name__ == "__main__":
    main()
