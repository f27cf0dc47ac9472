"""The ``tandem`` command: one file a verb. Training logic does not belong here.

A verb parses its configuration before anything imports torch, then makes one Python call.
"""

from __future__ import annotations

import os
import sys

import typer

from tandem import __version__
from tandem.cli import (
    bench,
    conformance,
    data,
    doctor,
    dpo,
    evaluate,
    generate,
    model,
    quickstart,
    replay,
    reward,
    rl,
    rollouts,
    serve,
    sft,
    status,
)
from tandem.cli.failures import report_failures

app = typer.Typer(
    name="tandem",
    help="Post-train language models with reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command("quickstart")(quickstart.quickstart)
app.command("sft")(sft.sft)
app.command("dpo")(dpo.dpo)
app.command("reward")(reward.reward)
app.command("rl")(rl.rl)
app.command("eval")(evaluate.evaluate)
app.command("generate")(generate.generate)
app.command("serve")(serve.serve)
app.add_typer(model.app, name="model")
app.command("rollouts")(rollouts.rollouts)
app.command("replay")(replay.replay)
app.add_typer(data.app, name="data")
app.command("status")(status.status)
app.add_typer(bench.app, name="bench")
app.command("conformance")(conformance.conformance)
app.command("doctor")(doctor.doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tandem {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
    debug: bool = typer.Option(
        False, "--debug", help="Show the traceback of an error; works after a verb too."
    ),
) -> None:
    pass


def main() -> None:
    """Entry point of the ``tandem`` command; ends the process with the exit code."""
    # Read when torch loads: idle threads that spin would starve a generator on the same cores.
    arguments = sys.argv[1:]
    if arguments[:1] != ["bench"]:  # Where nothing else is to run meanwhile.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    debug = "--debug" in own
    rest = [item for item in own if item != "--debug"] + arguments[len(own) :]
    with report_failures(debug=debug):
        app(rest, prog_name="tandem")
