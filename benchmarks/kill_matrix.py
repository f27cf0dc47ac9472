"""Exactly once: runs that are killed again and again at named moments, read by an independent hand.

Each run is a chain of starts: a start is killed (SIGKILL, by itself, at a moment) and the next one
resumes it, until the last is let through. Then ``audit_run`` looks whether any episode was lost or
trained twice. Tiny models, scripted completions, everything else real. Moments inside Tandem are
those of ``tandem.observe.moments``; two more are made here: in the middle of a generation and of a
reward. ``--generator`` adds runs whose generator is a process of its own, which is killed instead.

    python benchmarks/kill_matrix.py --kills 300 --generator 12
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

from audit_run import Findings, audit_after_kill, audit_finished

from tandem.config import load_config
from tandem.observe.moments import MOMENTS

BATCH_SIZE = 3
NUM_STEPS = 8
KILLS_PER_RUN = 5
OWN_MOMENTS = ("generation.token", "reward.call")
LATE = ("store.rewind", "checkpoint.retention")
"""Moments that a fresh run does not reach, or not soon."""
GENERATOR = "generator"
EXIT_ENGINE = 4
PATIENCE_S = 600.0

REWARD = """
import sys

def score(prompt, completion, prompt_ids, completion_ids, **row):
    sys.audit("tandem.moment", "reward.call")
    if len(completion) % 7 == 5:
        raise ValueError("an unlucky length")
    return float(len(completion) % 3 == 0)
"""


@dataclass(frozen=True)
class Kill:
    """Die when ``moment`` is reached for the ``occurrence``-th time in a start."""

    moment: str
    occurrence: int


@dataclass
class Tally:
    fired: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[str, Findings]] = field(default_factory=list)
    num_runs: int = 0
    num_starts: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "kills": self.fired.total(),
            "by_moment": dict(sorted(self.fired.items())),
            "runs": self.num_runs,
            "starts": self.num_starts,
            "lost": sum(len(f.lost) for _, f in self.findings),
            "doubled": sum(len(f.doubled) for _, f in self.findings),
            "faults": [f"{name}: {fault}" for name, f in self.findings for fault in f.faults],
        }


# --- one start, in a process of its own -----------------------------------------------------------


def settings(folder: Path, seed: int, *, generator: bool) -> dict[str, Any]:
    """A run of a few steps; the rule of staleness and the filter vary with the seed."""
    draw = random.Random(seed)
    return {
        "kind": "rl",
        "run": {"threads": 1, "seed": seed, "output_dir": str(folder), "name": f"run{seed}"},
        "model": {"path": str(folder / "model")},
        "data": {"source": "jsonl", "path": str(folder / "problems.jsonl")},
        "train": {"lr": 1e-3},
        "inference": {"mode": "process"} if generator else {"backend": "scripted"},
        "rollout": {
            "batch_size": BATCH_SIZE,
            "group_size": 2,
            "max_staleness": draw.choice([0, 1, 1, 2]),
            "stale_policy": draw.choice(["wait", "drop", "mask"]),
            "drop_zero_variance": draw.random() < 0.5,
            "max_failures_in_row": 200,
            "reward": {"name": f"{folder / 'reward.py'}:score"},
            "generation": {"max_new_tokens": 6},
        },
        "steps": NUM_STEPS,
        "checkpoint": {"every": draw.choice([1, 2, 3]), "keep": 2, "export_model": False},
        "store": {"keep_steps": draw.choice([None, None, 3])},
        "tracking": {"progress": False},
    }


def start(config: Any, kill: Kill | None, *, resume: bool) -> int:
    """Run in a forked process; returns its exit code, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        run_dir = Path(config.run.output_dir) / config.run.name
        code = 1
        try:
            log = os.open(f"{run_dir}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            code = _run(config, kill, run_dir, resume=resume)
        finally:
            os._exit(code)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise SystemExit(f"{config.run.name} did not end; its log: {config.run.name}.log")
        time.sleep(0.005)


def _run(config: Any, kill: Kill | None, run_dir: Path, *, resume: bool) -> int:
    from tandem.errors import TandemError
    from tandem.trainers import run_rl

    try:
        _record_training(run_dir)
        if kill is not None:
            _arm(kill, run_dir)
        run_rl(config, resume=resume)
    except TandemError as error:
        traceback.print_exc()
        return error.exit_code
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _append(path: Path, record: dict[str, Any]) -> None:
    """One write, which a kill afterwards cannot take back."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, json.dumps(record).encode() + b"\n")
    os.close(file)


def _record_training(run_dir: Path) -> None:
    """``trained.jsonl`` gets the episodes of every batch that training begins with."""
    from tandem.trainers.rl_learner import Learner

    original = Learner.learn

    def learn(self: Any, batch: Any, *arguments: Any, **options: Any) -> Any:
        episodes = sorted(set(batch["episode_ids"].tolist()))
        step = self.policy.get_version() + 1
        _append(run_dir / "trained.jsonl", {"step": step, "episodes": episodes})
        return original(self, batch, *arguments, **options)

    Learner.learn = learn  # type: ignore[method-assign]


def _arm(kill: Kill, run_dir: Path) -> None:
    from tandem.inference.scripted import ScriptedBackend

    advance = ScriptedBackend._advance

    def audited(self: Any, run: Any) -> Any:
        if run.ids:
            sys.audit("tandem.moment", "generation.token")
        return advance(self, run)

    ScriptedBackend._advance = audited  # type: ignore[method-assign]
    times = Counter[str]()
    awaited = "rollout.handed_over" if kill.moment == GENERATOR else kill.moment

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "tandem.moment":
            return
        times[arguments[0]] += 1
        if arguments[0] == awaited and times[awaited] == kill.occurrence:
            _append(run_dir / "fired.jsonl", {"moment": kill.moment, "pid": os.getpid()})
            if kill.moment == GENERATOR:
                for child in _children():
                    os.kill(child, signal.SIGKILL)
            else:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _children() -> list[int]:
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(pid) for pid in path.read_text().split()]


# --- chains of starts -----------------------------------------------------------------------------


def run_chain(folder: Path, seed: int, kills: list[Kill], tally: Tally) -> None:
    """One run, killed as ``kills`` say, then let through and audited."""
    generator = any(kill.moment == GENERATOR for kill in kills)
    config = load_config(settings(folder, seed, generator=generator))
    run_dir = folder / config.run.name
    run_dir.mkdir()
    tally.num_runs += 1
    code = None
    for kill in kills:
        before = _num_fired(run_dir)
        code = start(config, kill, resume=_can_resume(run_dir))
        tally.num_starts += 1
        if _num_fired(run_dir) == before:
            if code == 0:
                break  # at its end without having reached the moment so often
            raise SystemExit(f"{run_dir.name}: exit code {code} without a kill; see {run_dir}.log")
        expected = EXIT_ENGINE if kill.moment == GENERATOR else -signal.SIGKILL
        if code != expected:
            raise SystemExit(f"{run_dir.name}: exit code {code} after {kill}; see {run_dir}.log")
        tally.fired[kill.moment] += 1
        if (run_dir / "rollouts.sqlite").exists():
            _note(tally, f"{run_dir.name} after {kill}", audit_after_kill(run_dir, BATCH_SIZE))
    if code != 0:
        code = start(config, None, resume=_can_resume(run_dir))
        tally.num_starts += 1
    if code != 0:
        raise SystemExit(f"{run_dir.name}: exit code {code}; see {run_dir}.log")
    findings = audit_finished(run_dir, BATCH_SIZE, num_steps=NUM_STEPS)
    _note(tally, run_dir.name, findings)
    if findings.are_clean:
        shutil.rmtree(run_dir)


def _num_fired(run_dir: Path) -> int:
    path = run_dir / "fired.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def _can_resume(run_dir: Path) -> bool:
    return (run_dir / "config.yaml").exists()


def _note(tally: Tally, name: str, findings: Findings) -> None:
    if not findings.are_clean:
        tally.findings.append((name, findings))


def prepare(folder: Path) -> None:
    """The model, the problems and the reward that all runs share."""
    from tandem.config import TinyModelConfig
    from tandem.models.tiny import save_tiny_model

    letters = "abcdefgh"
    tiny = TinyModelConfig(
        alphabet=letters,
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        intermediate_size=32,
        max_position=16,
    )
    save_tiny_model(tiny, folder / "model", seed=0)
    words = ["".join(word) for word in permutations(letters, 3)]
    rows = [json.dumps({"question": word, "answer": word[0]}) for word in words]
    (folder / "problems.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "reward.py").write_text(REWARD)


def run_matrix(folder: Path, *, kills: int, generator: int, seed: int) -> Tally:
    """``kills`` kills, spread over the moments; ``generator`` of them are the generator's."""
    prepare(folder)
    tally = Tally()
    draw = random.Random(seed)
    moments = [*MOMENTS, *OWN_MOMENTS]
    number = 0
    while (left := kills - generator - tally.fired.total()) > 0:
        # The rarest so far come first, so that every moment has its share.
        rarest = sorted(moments, key=lambda moment: (tally.fired[moment], draw.random()))
        chosen = [_kill(moment, draw) for moment in rarest[: min(left, KILLS_PER_RUN)]]
        draw.shuffle(chosen)
        chosen.sort(key=lambda kill: kill.moment in LATE)
        run_chain(folder, seed * 10_000 + number, chosen, tally)
        number += 1
    while tally.fired[GENERATOR] < generator:
        count = min(3, generator - tally.fired[GENERATOR])
        chosen = [Kill(GENERATOR, draw.randint(1, 3)) for _ in range(count)]
        run_chain(folder, seed * 10_000 + number, chosen, tally)
        number += 1
    return tally


def _kill(moment: str, draw: random.Random) -> Kill:
    if moment in OWN_MOMENTS:
        return Kill(moment, draw.randint(1, 40))
    return Kill(moment, draw.randint(1, 1 if moment in LATE else 2))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--generator", type=int, default=12, help="how many kill the generator")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep everything there; default: temporary")
    arguments = parser.parse_args()
    import torch

    import tandem.trainers

    assert tandem.trainers
    torch.set_num_threads(1)
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="kill-matrix-"))
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    tally = run_matrix(
        folder, kills=arguments.kills, generator=arguments.generator, seed=arguments.seed
    )
    result = tally.as_json() | {"wall_s": round(time.monotonic() - began, 1)}
    print(json.dumps(result, indent=1))
    is_clean = not (result["lost"] or result["doubled"] or result["faults"])
    if arguments.folder is None and is_clean:
        shutil.rmtree(folder)
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
