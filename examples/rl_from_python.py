"""The quickstart task from Python: a tiny model learns to spell words backward.

    python examples/rl_from_python.py
    python examples/rl_from_python.py steps=20 train.lr=1e-4

Arguments change keys of the recipe, as they do on the command line.
"""

from __future__ import annotations

import sys

from tandem import load_config, run_rl
from tandem.config import resolve_recipe


def main(overrides: list[str]) -> None:
    config = load_config(resolve_recipe("quickstart"), ["run.name=from-python", *overrides])
    summary = run_rl(config)
    print(f"accuracy before: {summary['accuracy_before']:.3f}")
    print(f"accuracy after:  {summary['accuracy_after']:.3f}")
    print(f"model:           {summary['model_dir']}")


if __name__ == "__main__":
    main(sys.argv[1:])
