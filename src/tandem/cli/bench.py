"""``tandem bench``: measurements of this machine. What is measured is in ``tandem.testing``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tandem.cli.configs import find_model
from tandem.errors import ConfigError

app = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    pass


@app.command("inference")
def inference(
    model_dir: Annotated[
        str, typer.Argument(metavar="MODEL_DIR", help="A model directory, or a finished run.")
    ],
    concurrent: Annotated[
        str, typer.Option(help="Requests at the same time, separated by commas.")
    ] = "1,8,32,64",
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 64,
    new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds, in which all take turns.")] = 5,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    numerics: Annotated[str, typer.Option(help="As inference.numerics.")] = "fast",
    transformers: Annotated[
        bool, typer.Option("--transformers/--no-transformers", help="Beside generate().")
    ] = True,
    vllm: Annotated[
        str | None, typer.Option(metavar="PYTHON", help="Beside vLLM of this environment.")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write all figures there.")
    ] = None,
) -> None:
    """Throughput and latency of generation, beside other engines, which take turns."""
    path = find_model(model_dir)
    counts = _counts(concurrent)
    _one_of("--dtype", dtype, ("float32", "bfloat16"))
    _one_of("--numerics", numerics, ("matched", "fast"))
    if json_path is not None and not json_path.parent.is_dir():
        raise ConfigError(f"--json {str(json_path)!r}: its folder does not exist; make it first")
    from tandem.models.loading import context_length
    from tandem.testing.inference_speed import SpeedPlan, measure_speed

    if prompt_tokens + new_tokens > (context := context_length(str(path))):
        raise ConfigError(
            f"--prompt-tokens {prompt_tokens} and --new-tokens {new_tokens}: allowed together: at "
            f"most the model's context of {context}"
        )
    plan = SpeedPlan(
        concurrent=counts,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        repeats=repeats,
        threads=threads,
        dtype=dtype,  # type: ignore[arg-type]
        numerics=numerics,  # type: ignore[arg-type]
        with_transformers=transformers,
        vllm=vllm,
    )
    console = Console(stderr=True)
    figures = measure_speed(str(path), plan, progress=console.print)
    Console().print(_table(figures))
    if json_path is not None:
        json_path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise ConfigError(
            f"--concurrent: got {text!r}, allowed: positive integers with commas between them"
        )
    return counts


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{option}: got {value!r}, allowed: {', '.join(allowed)}")


def _table(figures: dict[str, Any]) -> Table:
    """In a peer's column: its rate, and ours over it."""
    peers = [name for name in ("transformers", "vllm") if name in figures["rows"][0]]
    rounds = f"medians of {figures['repeats']} rounds, × of their ratios"
    title = f"tokens/s, {figures['dtype']}; {rounds}"
    table = Table("at once", "tandem", *peers, "first token ms", "gap ms", title=title)
    for column in table.columns:
        column.justify = "right"
    for row in figures["rows"]:
        rates = {name: f"{row[name]['median_tokens_per_s']:.0f}" for name in ("tandem", *peers)}
        if row.get("transformers_dtype", figures["dtype"]) != figures["dtype"]:
            rates["transformers"] += f" in {row['transformers_dtype']}"
        wait = row["latency"]
        table.add_row(
            str(row["concurrent"]),
            rates["tandem"],
            *(f"{rates[name]} (×{row[f'over_{name}']:.2f})" for name in peers),
            *(
                f"{wait[f'{name}_p50_ms']:.1f}, p95 {wait[f'{name}_p95_ms']:.1f}"
                for name in ("first_token", "gap")
            ),
        )
    return table
