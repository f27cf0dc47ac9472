"""``tandem data``: look at data and chat templates before a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tandem.errors import ConfigError, DataError

if TYPE_CHECKING:
    from tandem.data.lint import Lengths, Report

app = typer.Typer(help="Check data and chat templates.", no_args_is_help=True)

_COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}


@app.command("lint")
def lint(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="JSONL, parquet, or a saved dataset directory.")
    ],
    model: Annotated[
        str | None, typer.Option("--model", metavar="DIR", help="Whose tokenizer counts.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens that a row may have.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="As data.chat=true.")] = False,
    prompt_template: Annotated[str | None, typer.Option(help="As data.prompt_template.")] = None,
    answer_template: Annotated[str | None, typer.Option(help="As data.answer_template.")] = None,
    column: Annotated[
        list[str] | None, typer.Option(metavar="OURS=THEIRS", help="As data.columns; repeatable.")
    ] = None,
) -> None:
    """Columns, lengths, duplicates, and rows that a run would stumble over.

    Ends with code 3 when a run would refuse the file.
    """
    if max_length is not None and model is None:
        raise ConfigError("--max-length needs --model: lengths are counted in tokens")
    from tandem.config import DataConfig

    config = DataConfig(
        source=_source(file),
        path=str(file),
        chat=chat,
        prompt_template=prompt_template,
        answer_template=answer_template,
        columns=_columns(column or []),
        shuffle=False,
    )
    from tandem.data.lint import lint_file

    report = lint_file(config, _tokenizer(model) if model else None, max_length=max_length)
    _show_report(report, Console())
    if report.has_errors:
        raise typer.Exit(DataError.exit_code)


@app.command("lint-template")
def lint_chat_template(
    model: Annotated[
        str, typer.Argument(metavar="MODEL_DIR", help="A model directory, or a finished run.")
    ],
) -> None:
    """Whether a chat template suits generation, training and tools, turn by turn."""
    from tandem.data.lint_template import lint_template

    findings = lint_template(_tokenizer(model))
    table = Table("check", "", "")
    for finding in findings:
        colour = _COLOURS[finding.level]
        table.add_row(finding.check, f"[{colour}]{finding.level}[/]", escape(finding.text))
    Console().print(table)
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(DataError.exit_code)


def _source(path: Path) -> Any:
    if path.is_dir():
        return "dataset"
    return "parquet" if path.suffix == ".parquet" else "jsonl"


def _columns(pairs: list[str]) -> dict[str, str]:
    columns = {}
    for pair in pairs:
        ours, separator, theirs = pair.partition("=")
        if not separator or not ours or not theirs:
            raise ConfigError(f"--column: got {pair!r}, allowed: OURS=THEIRS")
        columns[ours] = theirs
    return columns


def _tokenizer(model: str) -> Any:
    """That of a model directory, a tokenizer's own directory, or a finished run."""
    from tandem.cli.configs import find_model
    from tandem.models.loading import load_tokenizer

    path = Path(model)
    has_tokenizer = (path / "tokenizer_config.json").is_file()
    return load_tokenizer(str(path if has_tokenizer else find_model(model)))


def _show_report(report: Report, console: Console) -> None:
    title = f"{escape(report.name)}: {report.num_rows} rows, {report.kind}"
    console.print(title, highlight=False, soft_wrap=True)
    table = Table("column", "rows", "types")
    for name, column in report.columns.items():
        types = ", ".join(kind for kind, _ in column.types.most_common())
        table.add_row(escape(name), str(column.present), types)
    console.print(table)
    _show_lengths("tokens before the first target", report.prompt_lengths, console)
    _show_lengths("tokens of a row", report.row_lengths, console)
    for problem in report.problems:
        level = "error" if problem.is_error else "warning"
        console.print(
            f"[{_COLOURS[level]}]{level}[/] {escape(problem.what)}: {problem.count}, first "
            f"{escape(problem.example)}",
            highlight=False,
            soft_wrap=True,
        )
    if not report.problems:
        console.print("[green]nothing to complain about[/]")


def _show_lengths(what: str, lengths: Lengths | None, console: Console) -> None:
    if lengths is not None:
        console.print(
            f"{what}: {lengths.min} to {lengths.max}, median {lengths.median}, 95 % within "
            f"{lengths.p95}",
            highlight=False,
        )
