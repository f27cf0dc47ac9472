"""Whether asynchronous runs reach what synchronous ones reach: one recipe, both ways, many seeds.

python benchmarks/staleness_accuracy.py quickstart --seeds 0 1 2 3 4 --problems 1000
"""

from __future__ import annotations

import statistics
import tempfile
from typing import Any

from machine import parser, report
from recipe import run_once


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("recipe")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    arguments.add_argument("--problems", type=int, default=1000)
    arguments.add_argument("--set", nargs="*", default=[], help="section.key=value overrides")
    options = arguments.parse_args()
    overrides = [f"eval.data.size={options.problems}", *options.set]
    ways = {"asynchronous": [], "synchronous": ["rollout.max_staleness=0"]}
    figures: dict[str, Any] = {"recipe": options.recipe, "seeds": options.seeds}
    for name, changes in ways.items():
        with tempfile.TemporaryDirectory() as folder:
            runs = [
                run_once(options.recipe, seed, [*overrides, *changes], folder)
                for seed in options.seeds
            ]
        figures[name] = {
            "accuracy_after": [run["accuracy_after"] for run in runs],
            "mean": statistics.mean(run["accuracy_after"] for run in runs),
            "max_staleness_seen": max(run["max_staleness_seen"] for run in runs),
            "train_s": statistics.mean(run["train_s"] for run in runs),
        }
    figures["difference"] = figures["asynchronous"]["mean"] - figures["synchronous"]["mean"]
    report(figures, options.json)


if __name__ == "__main__":
    main()
