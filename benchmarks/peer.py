"""Runs a script of ``peers/`` in that peer's own Python; not what is measured there."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parent


@dataclass(frozen=True)
class Peer:
    name: str
    python: str
    script: Path

    @classmethod
    def find(cls, item: str, part: str) -> Peer:
        """Of ``NAME=PYTHON`` on the command line, for ``peers/NAME_part.py``."""
        name, _, python = item.partition("=")
        scripts = {
            path.stem.removesuffix(f"_{part}"): path
            for path in (BENCHMARKS / "peers").glob(f"*_{part}.py")
        }
        if not python or name not in scripts:
            known = sorted(scripts)
            raise SystemExit(f"--peer {item}: expected NAME=PYTHON with a NAME of {known}")
        return cls(name, python, scripts[name])

    def run(self, arguments: list[str], *, threads: int) -> dict[str, Any]:
        """What the last line of its output says."""
        folders = os.pathsep.join(map(str, (BENCHMARKS, BENCHMARKS.parent)))
        done = subprocess.run(
            [self.python, str(self.script), *arguments],
            env=os.environ | {"PYTHONPATH": folders, "OMP_NUM_THREADS": str(threads)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
