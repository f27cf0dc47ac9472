"""``tandem model``: bring a model in from another format, or say what a directory holds."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tandem.cli.configs import find_model
from tandem.errors import DataError

app = typer.Typer(help="Import a model, or describe one.", no_args_is_help=True)


@app.command("import")
def import_model(
    source: Annotated[
        str, typer.Argument(help="A .gguf file, or a known name, e.g. smollm2-135m-instruct.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Where to write it.", show_default="models/NAME")
    ] = None,
) -> None:
    """Turn a model into a Hugging Face directory, once."""
    from tandem.models.importing import import_gguf

    target = import_gguf(source, out or Path("models") / Path(source).name.removesuffix(".gguf"))
    typer.echo(str(target))


@app.command("info")
def describe_model(
    model_dir: Annotated[
        str, typer.Argument(metavar="MODEL_DIR", help="A model directory, or a finished run.")
    ],
) -> None:
    """Architecture, size and tokenizer of a model directory."""
    path = find_model(model_dir)
    table = Table("", "", show_header=False)
    for name, value in model_facts(path).items():
        table.add_row(name, str(value))
    Console().print(table)


def model_facts(path: Path) -> dict[str, Any]:
    """What the files of a Hugging Face directory say, without loading a model.

    Raises:
        DataError: a file is not what its name says.
    """
    config = _read_json(path / "config.json")
    facts: dict[str, Any] = {
        "directory": path,
        "architecture": ", ".join(config.get("architectures") or ["?"]),
        "layers": config.get("num_hidden_layers", "?"),
        "hidden size": config.get("hidden_size", "?"),
        "vocabulary": config.get("vocab_size", "?"),
        "context": config.get("max_position_embeddings", "?"),
    }
    parameters, dtypes, size_bytes = 0, set(), 0
    for file in sorted(path.glob("*.safetensors")):
        size_bytes += file.stat().st_size
        for entry in _tensors(file).values():
            parameters += math.prod(entry["shape"])
            dtypes.add(entry["dtype"])
    facts["parameters"] = f"{parameters:,}"
    facts["stored as"] = f"{', '.join(sorted(dtypes)) or 'nothing'}, {size_bytes / 1e6:,.1f} MB"
    tokenizer_path = path / "tokenizer_config.json"
    tokenizer = _read_json(tokenizer_path) if tokenizer_path.exists() else {}
    has_template = (path / "chat_template.jinja").exists() or "chat_template" in tokenizer
    facts["tokenizer"] = tokenizer.get("tokenizer_class", "none")
    facts["chat template"] = "yes" if has_template else "no"
    return facts


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _tensors(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: name -> dtype and shape."""
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 0 <= length <= path.stat().st_size - 8:
            raise DataError(f"{path} is not a safetensors file: its header is cut off")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise DataError(f"{path} is not a safetensors file: {error}") from None
    return {name: entry for name, entry in header.items() if name != "__metadata__"}
