"""A task that a tiny model learns in seconds, one warmed-up model, and whole runs of it.

The prompt is three small letters, the right answer the last of them as a capital. Demonstrations
give three capitals equally often, so that the warmed-up model is right about one time in three.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.cli import main
from tandem.config import load_config
from tandem.trainers import run_rl
from tests.runs.launcher import Launcher

LETTERS = "abcdefgh"
TINY = {
    "alphabet": LETTERS + LETTERS.upper(),
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "intermediate_size": 128,
    "max_position": 16,
}


def capital(word: str, shift: int = 0) -> str:
    return LETTERS[(LETTERS.index(word[-1]) + shift) % len(LETTERS)].upper()


def write_rows(path: Path, rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@dataclass(frozen=True)
class Problems:
    """Files of one task; ``heldout`` shares no problem with the others."""

    train: Path
    demonstrations: Path
    heldout: Path


@pytest.fixture(scope="session")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Problems:
    folder = tmp_path_factory.mktemp("problems")
    words = ["".join(letters) for letters in permutations(LETTERS, 3)]
    random.Random(0).shuffle(words)
    seen, heldout = words[:272], words[272:]

    def rows(words: list[str], shifts: tuple[int, ...]) -> list[dict[str, str]]:
        return [{"question": w, "answer": capital(w, k)} for w in words for k in shifts]

    return Problems(
        write_rows(folder / "train.jsonl", rows(seen, (0,))),
        write_rows(folder / "demonstrations.jsonl", rows(seen, (0, 3))),
        write_rows(folder / "heldout.jsonl", rows(heldout, (0,))),
    )


def warmup_section(problems: Problems, steps: int) -> dict[str, Any]:
    return {
        "steps": steps,
        "batch_size": 32,
        "max_length": 16,
        "checkpoint_every": 5,
        "data": {"source": "jsonl", "path": str(problems.demonstrations)},
        "train": {"lr": 3e-3, "schedule": "cosine", "warmup_steps": 10},
    }


def rl_settings(problems: Problems, model: dict[str, Any]) -> dict[str, Any]:
    """A synchronous run in one process, of a few steps of 4 prompts with 4 samples each."""
    return {
        "kind": "rl",
        "run": {"threads": 1},
        "model": model,
        "data": {"source": "jsonl", "path": str(problems.train)},
        "train": {"lr": 1e-3},
        "inference": {"mode": "inprocess"},
        "rollout": {
            "batch_size": 4,
            "group_size": 4,
            "max_staleness": 0,
            "reward": {"name": "exact_match"},
            "generation": {"max_new_tokens": 4},
        },
        "steps": 3,
        "eval": {
            "data": {"source": "jsonl", "path": str(problems.heldout)},
            "generation": {"greedy": True, "max_new_tokens": 4},
        },
        "checkpoint": {"every": 2},
        "tracking": {"progress": False},
    }


@dataclass(frozen=True)
class Bed:
    """Where a test's runs lie, and how it starts them."""

    folder: Path
    settings: dict[str, Any]

    def config(self, *overrides: str, name: str = "run") -> Any:
        return load_config(self.settings, [*self._where(name), *overrides])

    def arguments(self, *overrides: str, name: str = "run") -> list[str]:
        """What to type after ``tandem`` for the same run."""
        path = self.folder / "config.yaml"
        path.write_text(yaml.safe_dump(self.settings))
        return [self.settings["kind"], str(path), *self._where(name), *overrides]

    def _where(self, name: str) -> list[str]:
        return [f"run.output_dir={self.folder}", f"run.name={name}"]

    def run_dir(self, name: str = "run") -> Path:
        return self.folder / name


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The complete lines of a run's metrics."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def has_step(run_dir: Path, step: int) -> Callable[[], bool]:
    return lambda: any(row["step"] >= step for row in metrics(run_dir))


@dataclass(frozen=True)
class Warmed:
    model: Path
    summary: dict[str, Any]


@pytest.fixture(scope="session")
def warmed(tmp_path_factory: pytest.TempPathFactory, problems: Problems) -> Warmed:
    """A model after its warm-up, and the run that made it: one RL step with learning rate 0."""
    folder = tmp_path_factory.mktemp("warmed")
    settings = rl_settings(problems, {"tiny": TINY})
    settings["warmup"] = warmup_section(problems, steps=100)
    bed = Bed(folder, settings)
    summary = run_rl(bed.config("steps=2", "train.lr=0"))
    return Warmed(bed.run_dir() / "warmup" / "model", summary)


@pytest.fixture
def bed(tmp_path: Path, problems: Problems, warmed: Warmed) -> Bed:
    """Runs that start from the warmed-up model."""
    return Bed(tmp_path, rl_settings(problems, {"path": str(warmed.model)}))


@pytest.fixture
def cold_bed(tmp_path: Path, problems: Problems) -> Bed:
    """Runs that build their model and warm it up."""
    settings = rl_settings(problems, {"tiny": TINY})
    settings["warmup"] = warmup_section(problems, steps=60)
    return Bed(tmp_path, settings)


@pytest.fixture
def sft_bed(tmp_path: Path, problems: Problems) -> Bed:
    base = rl_settings(problems, {"tiny": TINY})
    kept = ("run", "model", "eval", "checkpoint", "tracking", "inference")
    settings = {"kind": "sft", "sft": warmup_section(problems, steps=40)}
    settings |= {name: base[name] for name in kept} | {"reward": {"name": "exact_match"}}
    return Bed(tmp_path, settings | {"checkpoint": {}})


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    yield made
    made.close()


@dataclass(frozen=True)
class Ended:
    code: int
    message: str


@pytest.fixture
def tandem_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Ended]:
    """Run a command in this process, as a user would type it."""

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["tandem", *arguments])
        code: Any = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        return Ended(code, capfd.readouterr().err)

    return run
