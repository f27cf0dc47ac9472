"""What each algorithm reaches on the quickstart's task, all from one warmed-up model.

python benchmarks/algorithms.py --json algorithms.json
python benchmarks/algorithms.py --recipes ppo rloo --set steps=20
python benchmarks/algorithms.py --start outputs/quickstart --seeds 0 1 --set eval.data.size=1000

The quickstart (GRPO) runs first and makes the warm-up that the others start from, unless
``--start`` names a finished one, which then serves all seeds; ``distill`` has a smaller student
with a warm-up of its own, and the quickstart's finished model as its teacher.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from machine import parser, report
from recipe import run_once

START = "quickstart"
RECIPES = ("ppo", "rloo", "dr-grpo", "dapo", "gspo", "cispo", "lora-grpo", "distill")
KEYS = ("accuracy_before", "accuracy_after", "steps", "train_s", "wall_s", "max_staleness_seen")


def overrides_of(recipe: str, start: dict[str, Any]) -> list[str]:
    """What makes ``recipe`` start from the model that the run ``start`` was warmed up to."""
    if recipe == "distill":
        return [f"teacher.path={start['model_dir']}"]
    warm = Path(start["model_dir"]).parent / "warmup" / "model"
    return ["warmup=null", "model.tiny=null", f"model.path={warm}"]


def run_all(
    recipes: list[str], seed: int, extra: list[str], folder: str, finished: Path | None
) -> dict[str, Any]:
    if finished is None:
        start = run_once(START, seed, extra, folder)
    else:
        start = json.loads((finished / "summary.json").read_text())
    found = {START: start}
    for recipe in recipes:
        found[recipe] = run_once(recipe, seed, [*overrides_of(recipe, start), *extra], folder)
    return {name: {key: summary[key] for key in KEYS} for name, summary in found.items()}


def table(runs: list[dict[str, Any]]) -> str:
    lines = [f"{'recipe':<12} {'before':>7} {'after':>7} {'train':>8}"]
    for name in runs[0]:
        mean = {key: statistics.mean(run[name][key] for run in runs) for key in KEYS[:4]}
        lines.append(
            f"{name:<12} {mean['accuracy_before']:>7.3f} {mean['accuracy_after']:>7.3f} "
            f"{mean['train_s']:>6.0f} s"
        )
    return "\n".join(lines)


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    arguments.add_argument("--start", type=Path, help="directory of a finished quickstart")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments.add_argument("--set", nargs="*", default=[], help="section.key=value overrides")
    options = arguments.parse_args()
    runs = []
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            runs.append(run_all(options.recipes, seed, options.set, folder, options.start))
    report({"seeds": options.seeds, "overrides": options.set, "runs": runs}, options.json)
    print(table(runs))


if __name__ == "__main__":
    main()
