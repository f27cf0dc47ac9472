"""The benchmark scripts run, at sizes whose figures mean nothing, and report what they promise."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = "--threads 1 --repeats 2"

pytestmark = pytest.mark.long


def run(tmp_path: Path, script: str, options: str) -> dict:
    path = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARKS / script), *options.split(), "--json", str(path)]
    source = str(BENCHMARKS.parent / "src")
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    figures = json.loads(path.read_text())
    assert figures["machine"]["cores"] >= 1
    assert all(math.isfinite(value) for value in numbers(figures))
    return figures


def numbers(value):
    if isinstance(value, dict):
        return [found for child in value.values() for found in numbers(child)]
    if isinstance(value, list):
        return [found for child in value for found in numbers(child)]
    return [value] if isinstance(value, int | float) else []


def test_train_step(tmp_path):
    sizes = "--size tiny --tokens 256 --length 32 --mean 20 --cap 128 --matrix 64"
    figures = run(tmp_path, "train_step.py", f"{sizes} {SMALL}")
    assert set(figures["step"]) == {"equal", "log_normal"}
    assert figures["step"]["log_normal"]["train_batch_over_hand"]["of_minima"] > 0
    assert figures["mfu"]["bfloat16"]["train_batch_mfu"]["median"] > 0
    assert figures["packing"]["equal"]["slots_over_tokens"] == 1.0
    assert figures["packing"]["log_normal"]["slots_over_tokens"] > 1.0
    assert figures["ranks"]["efficiency"]["of_minima"] > 0
    assert len(figures["scaling"]["length"]["min_ms"]) == 4


def test_head(tmp_path):
    figures = run(tmp_path, "head.py", f"--shapes 64x4000 --hidden 16 {SMALL}")
    for dtype in ("float32", "bfloat16"):
        assert 0 < figures[f"64x4000 {dtype}"]["peak_ratio"] < 1
        assert figures[f"64x4000 {dtype}"]["loss_difference"] < 1e-2


def test_checkpoint(tmp_path):
    figures = run(tmp_path, "checkpoint.py", f"--size tiny --tokens 256 --length 32 {SMALL}")
    assert figures["saving"]["size_mib"] > 0
    assert figures["saving"]["blocked_over_copy"]["median"] > 0
    assert figures["saving"]["whole_over_raw_write"]["median"] > 0
    assert figures["training"]["steps_beside_a_save"] >= 0
