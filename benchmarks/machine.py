"""What a benchmark says about the machine it ran on, and how it writes its figures."""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    import torch

    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def parser(description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", type=Path, help="write the figures to this file")
    return made


def report(figures: dict[str, Any], path: Path | None) -> None:
    record = {"machine": machine(), **figures}
    text = json.dumps(record, indent=2)
    print(text)
    if path is not None:
        path.write_text(text + "\n", encoding="utf-8")
