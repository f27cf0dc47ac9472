"""``tandem serve``: a model directory behind OpenAI's API, until it is stopped."""

from __future__ import annotations

import ipaddress
import signal
import threading
import uuid
from typing import Annotated

import typer

from tandem.cli.configs import find_model
from tandem.errors import CapabilityError, ConfigError
from tandem.types import GenerationConfig


def serve(
    model_dir: Annotated[
        str, typer.Argument(metavar="MODEL_DIR", help="A model directory, or a finished run.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        str, typer.Option(envvar="TANDEM_API_KEY", help="What clients must send; empty: nothing.")
    ] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 1024,
) -> None:
    """Serve chat and text completions; Ctrl-C or SIGTERM ends it."""
    if not api_key and not _is_loopback(host):
        raise ConfigError(
            f"--host: got {host}, which others can reach; give --api-key (or TANDEM_API_KEY) too"
        )
    path = str(find_model(model_dir))
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    try:
        from tandem.serve.gateway import Gateway
        from tandem.serve.session import Session
    except ImportError as error:
        raise CapabilityError(
            f"tandem serve: {error.name} is not installed; install it with: "
            "pip install 'tandem-rl[serve]'"
        ) from error
    from tandem.config import InferenceConfig, RolloutConfig
    from tandem.models.loading import load_tokenizer
    from tandem.rollout import EmbeddedInferenceEngine

    generation = GenerationConfig(max_new_tokens=max_new_tokens)
    engine = EmbeddedInferenceEngine(
        InferenceConfig(mode="inprocess"),
        RolloutConfig(),
        model_path=path,
        incarnation=uuid.uuid4().hex[:12],
    )
    gateway = Gateway(host, port)
    session = Session(
        engine,
        load_tokenizer(path),
        generation,
        "serve",
        lambda number, index: None,
        sampling="free",
        keeps=False,
        model="policy",
        key=api_key,
    )
    try:
        engine.initialize()
        typer.echo(f"serving {path} at {gateway.serve_as_default(session)}")
        stopped.wait()
    finally:
        gateway.close()
        engine.destroy()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
