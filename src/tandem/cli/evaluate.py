"""``tandem eval``: accuracy of a model on the evaluation data of a configuration, or on others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tandem.cli.configs import (
    CONFIG_FILE,
    DryRun,
    Overrides,
    find_config,
    find_model,
    print_config,
)
from tandem.errors import ConfigError

_BARE = {"kind": "eval", "model": {}, "eval": {}}
"""The configuration of a model without a run around it."""


def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|RUN_DIR|MODEL_DIR",
            help="A YAML file or recipe; a finished run or the model that it exported; or any "
            "model, with --data and --reward.",
        ),
    ],
    overrides: Overrides = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="DIR", help="Instead of the config's model.")
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option("-n", "--n", min=1, metavar="K", help="Completions a prompt; 1 is greedy."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="PATH|TASK",
            help="A .jsonl or .parquet file, a directory of Hugging Face datasets, or the name of "
            "a reasoning-gym task; eval.data.* says the rest.",
        ),
    ] = None,
    reward: Annotated[
        str | None, typer.Option("--reward", metavar="NAME", help="What scores a completion.")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write the result there too.")
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Measure a model on held-out problems: avg@k, pass@k and maj@k with 95 % intervals."""
    source, model_dir = _locate(target, model)
    changes = [*_of_model(model_dir), *_of_options(samples, data, reward), *(overrides or [])]
    from tandem.config import load_config

    config = load_config(source, changes)
    if dry_run:
        print_config(config)
        return
    from tandem.trainers import run_eval

    result = run_eval(config)
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    _show(result)


def _locate(target: str, model: str | None) -> tuple[Path | Mapping[str, Any], Path | None]:
    """The configuration and the model to put into it (None: the configuration's own)."""
    path = Path(target)
    chosen = find_model(model) if model is not None else None
    if not path.is_dir():
        return find_config(target), chosen
    chosen = chosen or find_model(target)
    for folder in (path, *path.resolve().parents[:2]):
        file = folder / CONFIG_FILE
        if file.is_file():
            return (_BARE if _is_of_pairs(file) else file), chosen
    return _BARE, chosen


def _is_of_pairs(file: Path) -> bool:
    """Whether a run's data are pairs, on which nothing is generated: of use is its model alone."""
    from tandem.config.parse import parse_yaml

    try:
        saved = parse_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {str(file)!r}: {error.strerror}") from None
    return isinstance(saved, dict) and saved.get("kind") == "dpo"


def _of_model(model_dir: Path | None) -> list[str]:
    if model_dir is None:
        return []
    return ["model=" + json.dumps({"path": str(model_dir)})]


def _of_options(samples: int | None, data: str | None, reward: str | None) -> list[str]:
    changes = [] if samples is None else [f"eval.samples={samples}"]
    if data is not None:
        changes.append("eval.data=" + json.dumps(_data_of(data)))
    if reward is not None:
        changes.append("eval.reward=" + json.dumps({"name": reward}))
    return changes


def _data_of(name: str) -> dict[str, Any]:
    """The section ``eval.data`` for a file, a directory, or a task by name."""
    path = Path(name)
    kinds = {".jsonl": "jsonl", ".parquet": "parquet"}
    if path.suffix in kinds:
        return {"source": kinds[path.suffix], "path": name}
    if path.is_dir():
        return {"source": "dataset", "path": name}
    if path.exists() or len(path.parts) > 1 or path.suffix:
        raise ConfigError(
            f"--data: got {name!r}, allowed: a .jsonl or .parquet file, a directory written by "
            "datasets' save_to_disk, or a reasoning-gym task"
        )
    return {"source": "reasoning_gym", "task": name, "size": 200}


def _show(result: Mapping[str, Any]) -> None:
    table = Table("metric", "value", "95 % interval")
    for name, value in result.items():
        if name.endswith(("_low", "_high")) or not isinstance(value, int | float | str):
            continue
        low, high = result.get(f"{name}_low"), result.get(f"{name}_high")
        interval = "" if low is None or high is None else f"{low:.4f} to {high:.4f}"
        table.add_row(name, f"{value:.4f}" if isinstance(value, float) else str(value), interval)
    Console().print(table)
