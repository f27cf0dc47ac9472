"""``tandem generate``: complete prompts with a model directory, in this process."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.text import Text

from tandem.cli.configs import find_model
from tandem.config import InferenceConfig
from tandem.errors import ConfigError, DataError
from tandem.types import GenerationConfig, LLMRequest, LLMResponse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion as the user sees it, token by token."""

    prompt: str
    sample: int
    text: str
    tokens: list[str]
    response: LLMResponse


def generate(
    model_dir: Annotated[
        str, typer.Argument(metavar="MODEL_DIR", help="A model directory, or a finished run.")
    ],
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="Text to complete; repeatable.")
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Completions of each prompt.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    seed: Annotated[int | None, typer.Option(min=0, help="Makes the result repeatable.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
    jsonl_in: Annotated[
        Path | None, typer.Option(help='Prompts, one {"prompt": ...} a line.')
    ] = None,
    jsonl_out: Annotated[
        Path | None, typer.Option(help="Write completions there, one JSON object a line.")
    ] = None,
) -> None:
    """Complete prompts; colours show how likely the model thought each token."""
    path = find_model(model_dir)
    config = GenerationConfig(
        max_new_tokens=max_new_tokens, temperature=temperature, n_samples=1, seed=seed
    )
    rows = [{"prompt": text} for text in prompt or ()] + (
        read_prompts(jsonl_in) if jsonl_in else []
    )
    if not rows:
        raise ConfigError("nothing to complete; give --prompt TEXT or --jsonl-in FILE")
    prompts = [str(row["prompt"]) for row in rows for _ in range(n)]
    if jsonl_out is None:
        _show(_complete(path, prompts, config, n, chat=chat), Console())
        return
    sources = [row for row in rows for _ in range(n)]
    with _open_output(jsonl_out) as file:
        _write(file, sources, _complete(path, prompts, config, n, chat=chat))


def _open_output(path: Path) -> TextIO:
    """Opened before the work, so that a bad path costs none; a file that is there is replaced."""
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--jsonl-out {str(path)!r}: {error.strerror}") from None


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file; blank lines are skipped.

    Raises:
        DataError: the file is missing, or a line is not an object with a text ``prompt``.
    """
    try:
        # Only b"\n" ends a line; text has other line ends, as U+2028, which JSON allows.
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"--jsonl-in {str(path)!r}: {error.strerror}") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except ValueError as error:
            raise DataError(f"--jsonl-in {path} line {number} is not JSON: {error}") from None
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
            raise DataError(
                f"--jsonl-in {path} line {number}: got {line[:60].decode(errors='replace')!r}, "
                'expected {"prompt": "..."}'
            )
        rows.append(row)
    return rows


def _complete(
    path: Path, prompts: Sequence[str], config: GenerationConfig, n: int, *, chat: bool
) -> list[Completion]:
    from tandem.inference.embedded import EmbeddedBackend
    from tandem.models.loading import load_tokenizer

    tokenizer = load_tokenizer(str(path))
    requests = [
        LLMRequest(
            rid=str(index),
            input_ids=_encode(tokenizer, text, f"prompt {index // n + 1}", chat=chat),
            gconfig=config if config.seed is None else config.new(seed=config.seed + index),
        )
        for index, text in enumerate(prompts)
    ]
    backend = EmbeddedBackend(InferenceConfig(mode="inprocess"), str(path), "generate")
    backend.start()
    try:

        async def run() -> list[LLMResponse]:
            return await asyncio.gather(*(backend.generate(request) for request in requests))

        responses = asyncio.run(run())
    finally:
        backend.close()
    return [
        Completion(
            prompt=text,
            sample=index % n,
            text=str(tokenizer.decode(response.output_tokens, skip_special_tokens=True)),
            tokens=[str(tokenizer.decode([token])) for token in response.output_tokens],
            response=response,
        )
        for index, (text, response) in enumerate(zip(prompts, responses, strict=True))
    ]


def _encode(
    tokenizer: PreTrainedTokenizerBase, text: str, where: str, *, chat: bool
) -> tuple[int, ...]:
    from tandem.data.text import encode, encode_prompt

    if not chat:
        return encode_prompt(tokenizer, text, where)
    if not tokenizer.chat_template:
        raise ConfigError("--chat: the model has no chat template; leave the option out")
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    # The template writes the special tokens itself.
    return encode(tokenizer, str(rendered), where)


def _write(
    file: TextIO, sources: Sequence[Mapping[str, Any]], completions: Sequence[Completion]
) -> None:
    for row, item in zip(sources, completions, strict=True):
        result = {
            "sample": item.sample,
            "completion": item.text,
            "stop_reason": item.response.stop_reason,
            "output_tokens": item.response.output_tokens,
            "output_logprobs": item.response.output_logprobs,
        }
        file.write(json.dumps({**row, **result}, ensure_ascii=False) + "\n")


def _show(completions: Sequence[Completion], console: Console) -> None:
    if not sys.stdout.isatty():
        for item in completions:
            typer.echo(item.text)
        return
    for item in completions:
        line = Text(item.prompt, style="dim")
        for token, logprob in zip(item.tokens, item.response.output_logprobs, strict=True):
            line.append(token, style=colour(logprob))
        line.append(f"  ({item.response.stop_reason})", style="dim")
        console.print(line)


def colour(logprob: float) -> str:
    """Green above probability 0.5, yellow above 0.1, else red."""
    if logprob > -0.6931:
        return "green"
    return "yellow" if logprob > -2.3026 else "red"
