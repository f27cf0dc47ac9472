"""From what a user typed to a configuration. The schema itself is in ``tandem.config``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tandem.errors import ConfigError

CONFIG_FILE = "config.yaml"

ConfigArgument = Annotated[
    str, typer.Argument(metavar="CONFIG", help="A YAML file, or the name of a shipped recipe.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Changes, e.g. train.lr=1e-5."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the resolved configuration and stop.")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on from the newest checkpoint of the run.")
]


def find_config(name: str) -> Path:
    """The file called ``name``, or the recipe of that name.

    Raises:
        ConfigError: neither exists.
    """
    path = Path(name)
    if path.is_dir() and (path / CONFIG_FILE).is_file():
        return path / CONFIG_FILE
    if path.exists() or path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        return path
    from tandem.config import resolve_recipe

    return resolve_recipe(name)


def read_config(name: str, overrides: Sequence[str] | None, *, kind: str | None) -> Any:
    from tandem.config import load_config

    return load_config(find_config(name), overrides or (), kind=kind)


def print_config(config: Any) -> None:
    from tandem.config import to_yaml

    typer.echo(to_yaml(config), nl=False)


def find_model(name: str) -> Path:
    """The model directory ``name``, or the model that the run directory ``name`` exported.

    Raises:
        ConfigError: there is no model there.
    """
    path = Path(name)
    if (path / "config.json").is_file():
        return path
    from tandem.observe import read_summary

    summary = read_summary(path) or {}
    exported = summary.get("model_dir")
    # A run directory that was moved knows its model by the old name.
    for candidate in (Path(exported), path / Path(exported).name) if exported else ():
        if (candidate / "config.json").is_file():
            return candidate
    raise ConfigError(
        f"model {name!r}: expected a Hugging Face directory (with config.json) or the directory "
        "of a finished run (with summary.json)"
    )
