"""What the RL phase of a finished run adds to its warm-up: two controls.

    python benchmarks/controls.py outputs/quickstart --json controls.json

1. pass@8 of the warmed-up model: what it can do before RL, given eight tries at temperature 1.
2. More of the same: as many seconds of further supervised training on the same demonstrations.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import yaml
from machine import parser, report

from tandem import load_config, run_eval, run_sft


def pass_at_8(config: dict[str, Any], model_dir: str) -> dict[str, Any]:
    evaluation = config["eval"] | {"samples": 8}
    evaluation["generation"] = evaluation["generation"] | {"greedy": False, "temperature": 1.0}
    return run_eval(load_config(config | {"model": {"path": model_dir}, "eval": evaluation}))


def further_sft(config: dict[str, Any], model_dir: str, seconds: float, step_s: float) -> Any:
    stage = config["warmup"] | {"steps": max(1, round(seconds / step_s)), "checkpoint_every": 0}
    with tempfile.TemporaryDirectory() as folder:
        return run_sft(
            load_config(
                {
                    "kind": "sft",
                    "run": {"name": "control", "output_dir": folder, "seed": config["run"]["seed"]},
                    "model": {"path": model_dir},
                    "sft": stage,
                    "eval": config["eval"] | {"every": 0},
                    "reward": config["rollout"]["reward"],
                    "tracking": {"progress": False},
                }
            )
        )


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("run", type=Path, help="directory of a finished run with a warm-up")
    options = arguments.parse_args()
    config = yaml.safe_load((options.run / "config.yaml").read_text())
    summary = json.loads((options.run / "summary.json").read_text())
    warmup = (options.run / "warmup" / "metrics.jsonl").read_text().splitlines()
    step_s = sum(json.loads(line)["timing_s/step"] for line in warmup) / len(warmup)
    model_dir = str(options.run / "warmup" / "model")
    control = further_sft(config, model_dir, summary["train_s"], step_s)
    report(
        {
            "before_rl": summary["accuracy_before"],
            "after_rl": summary["accuracy_after"],
            "rl_seconds": summary["train_s"],
            "pass@8_before_rl": pass_at_8(config, model_dir)["pass@8"],
            "after_further_sft": control["accuracy_after"],
            "further_sft_steps": control["steps"],
            "further_sft_seconds": control["wall_s"],
        },
        options.json,
    )


if __name__ == "__main__":
    main()
