"""Whether asynchronous runs reach what synchronous ones reach: one recipe, both ways, many seeds.

python benchmarks/staleness_accuracy.py quickstart --seeds 0 1 2 3 4 --problems 1000

The synchronous run of a seed starts from the model that the asynchronous one was warmed up to, so
that nothing but the RL phase differs.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from machine import parser, report
from recipe import run_once

KEYS = (
    "seed",
    "accuracy_before",
    "accuracy_after",
    "max_staleness_seen",
    "mismatch_max",
    "train_s",
)


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("recipe")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    arguments.add_argument("--problems", type=int, default=1000)
    arguments.add_argument("--set", nargs="*", default=[], help="section.key=value overrides")
    arguments.add_argument("--output-dir", help="keep the runs here (default: a temporary folder)")
    options = arguments.parse_args()
    overrides = [f"eval.data.size={options.problems}", *options.set]
    found: dict[str, list[dict[str, Any]]] = {"asynchronous": [], "synchronous": []}
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as scratch:
            folder = options.output_dir or scratch
            run = run_once(options.recipe, seed, overrides, f"{folder}/asynchronous")
            warm = Path(run["model_dir"]).parent / "warmup" / "model"
            start = (
                ["warmup=null", "model.tiny=null", f"model.path={warm}"] if warm.exists() else []
            )
            changes = [*overrides, "rollout.max_staleness=0", *start]
            other = run_once(options.recipe, seed, changes, f"{folder}/synchronous")
        for name, summary in (("asynchronous", run), ("synchronous", other)):
            found[name].append({key: summary[key] for key in KEYS})
    means = {
        name: statistics.mean(r["accuracy_after"] for r in runs) for name, runs in found.items()
    }
    figures: dict[str, Any] = {"recipe": options.recipe, "problems": options.problems, **found}
    figures |= {"means": means, "difference": means["asynchronous"] - means["synchronous"]}
    report(figures, options.json)


if __name__ == "__main__":
    main()
