"""Run a recipe with several seeds, each in a process of its own, and collect what it reached.

python benchmarks/recipe.py quickstart --seeds 0 1 2 3 4 --json quickstart.json
python benchmarks/recipe.py quickstart --seeds 0 1 --set rollout.max_staleness=0
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import parser, report

from tandem.config import load_config, resolve_recipe


def run_once(recipe: str, seed: int, overrides: list[str], output_dir: str) -> dict[str, Any]:
    name = f"{recipe}-seed{seed}"
    path = resolve_recipe(recipe)
    command = [sys.executable, "-m", "tandem", load_config(path).kind, str(path)]
    command += [f"run.seed={seed}", f"run.name={name}", f"run.output_dir={output_dir}"]
    started = time.perf_counter()
    subprocess.run([*command, *overrides], check=True, stdout=sys.stderr)
    wall_s = time.perf_counter() - started
    run_dir = Path(output_dir) / name
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    figures: dict[str, Any] = {"process_wall_s": wall_s}
    if rewards:
        figures["reward_first5"] = statistics.mean(rewards[:5])
        figures["reward_last5"] = statistics.mean(rewards[-5:])
        figures["rewards"] = rewards
    return summary | figures


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("recipe")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments.add_argument("--set", nargs="*", default=[], help="section.key=value overrides")
    arguments.add_argument("--output-dir", help="keep the runs here (default: a temporary folder)")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.output_dir or scratch
        runs = [run_once(options.recipe, seed, options.set, folder) for seed in options.seeds]
    peak_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    figures: dict[str, Any] = {"recipe": options.recipe, "overrides": options.set, "runs": runs}
    for key in (
        "accuracy_before",
        "accuracy_after",
        "margin_after",
        "process_wall_s",
        "mismatch_max",
    ):
        values = [run[key] for run in runs if run.get(key) is not None]
        if values:
            figures[key] = {
                "min": min(values),
                "mean": statistics.mean(values),
                "max": max(values),
            }
    figures["largest_process_mib"] = peak_mib
    report(figures, options.json)


if __name__ == "__main__":
    main()
