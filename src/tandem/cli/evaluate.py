"""``tandem eval``: accuracy of a model on the evaluation data of a configuration."""

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


def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|RUN_DIR|MODEL_DIR",
            help="A YAML file or recipe; or a finished run, or the model that it exported.",
        ),
    ],
    overrides: Overrides = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="DIR", help="Instead of the config's model.")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write the result there too.")
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Measure a model on the held-out problems of a configuration."""
    source, model_dir = _locate(target, model)
    config = _with_model(source, model_dir, overrides or [])
    if dry_run:
        print_config(config)
        return
    from tandem.trainers import run_eval

    result = run_eval(config)
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    _show(result)


def _locate(target: str, model: str | None) -> tuple[Path, Path | None]:
    """The configuration and the model to put into it (None: the configuration's own)."""
    path = Path(target)
    chosen = find_model(model) if model is not None else None
    if not path.is_dir():
        return find_config(target), chosen
    chosen = chosen or find_model(target)
    for folder in (path, *path.resolve().parents[:2]):
        if (folder / CONFIG_FILE).is_file():
            return folder / CONFIG_FILE, chosen
    raise ConfigError(
        f"{target!r} is a model without a run around it; say what to measure it on: "
        f"tandem eval CONFIG.yaml --model {target}"
    )


def _with_model(source: Path, model_dir: Path | None, overrides: list[str]) -> Any:
    from tandem.config import load_config
    from tandem.config.parse import parse_yaml

    if model_dir is None:
        return load_config(source, overrides)
    try:
        data = parse_yaml(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {str(source)!r}: {error.strerror}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"config file {str(source)!r}: expected a mapping of sections")
    data["model"] = {"path": str(model_dir)}
    return load_config(data, overrides)


def _show(result: Mapping[str, Any]) -> None:
    table = Table("metric", "value")
    for name, value in result.items():
        if isinstance(value, int | float | str):
            table.add_row(name, f"{value:.4f}" if isinstance(value, float) else str(value))
    Console().print(table)
