"""``tandem conformance``: prove a training backend against its contract."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tandem.errors import ConfigError


def conformance(
    backend: Annotated[str, typer.Option(help="Name of the train engine, e.g. local.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[train.KEY=VALUE]...",
            help="Changes to the train section, e.g. train.parallel.gather_per_microbatch=false.",
        ),
    ] = None,
    world: Annotated[int, typer.Option(min=1, help="Ranks, one process each.")] = 1,
    replicate: Annotated[int, typer.Option(min=1, help="Replicas of sharded ranks.")] = 1,
    tensor: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    sequence: Annotated[int, typer.Option(min=1, help="Sequence-parallel ranks.")] = 1,
    model_type: Annotated[
        str, typer.Option(help="language_model, value_model or reward_model.")
    ] = "language_model",
    lora: Annotated[bool, typer.Option("--lora", help="Train an adapter.")] = False,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or npu; default: what is there.")
    ] = None,
    check: Annotated[
        list[str] | None, typer.Option(help="Only this check; may be repeated.")
    ] = None,
    module: Annotated[
        list[str] | None,
        typer.Option(help="A module to import first, which registers the engine; repeatable."),
    ] = None,
    timeout_s: Annotated[float, typer.Option(min=1, help="Longest check, with ranks.")] = 120.0,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write every figure to this file.")
    ] = None,
) -> None:
    """Print check, figure, tolerance and verdict of every check; exit code 1 if one fails."""
    degrees = {"replicate": replicate, "tensor": tensor, "sequence": sequence}
    train = train_changes(overrides or [], degrees)
    from tandem.testing.conformance import print_report, run, write_json

    report = run(
        backend,
        model_type=model_type,
        world=world,
        lora=lora,
        dtype=dtype,
        device=device,
        train=train,
        checks=check,
        modules=module or (),
        timeout_s=timeout_s,
        on_outcome=lambda outcome: typer.echo(f"{outcome.verdict}: {outcome.check}", err=True),
    )
    print_report(report)
    if json_path is not None:
        write_json(report, json_path)
    if not report.passed:
        raise typer.Exit(1)


def train_changes(overrides: list[str], degrees: dict[str, int]) -> dict[str, Any]:
    """The train section's changes as nested keys, parallel degrees above 1 included.

    Raises:
        ConfigError: an override is not ``train.KEY=VALUE``.
    """
    from tandem.config.load import parse_overrides

    data = parse_overrides(overrides)
    if other := sorted(data.keys() - {"train"}):
        raise ConfigError(f"override {other[0]}: only keys of train can be changed here")
    train: dict[str, Any] = data.get("train", {})
    if not isinstance(train, dict):
        raise ConfigError(f"override train={train!r}: expected train.KEY=VALUE")
    chosen = {axis: degree for axis, degree in degrees.items() if degree > 1}
    if chosen:
        train["parallel"] = {**train.get("parallel", {}), **chosen}
    return train
