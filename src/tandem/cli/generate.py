"""``tandem generate``: complete prompts with a model directory, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from tandem.cli.configs import find_model
from tandem.errors import ConfigError, DataError
from tandem.types import GenerationConfig, LLMRequest, LLMResponse


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
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    min_p: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; repeatable.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    seed: Annotated[int | None, typer.Option(min=0, help="Makes the result repeatable.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    jsonl_in: Annotated[
        Path | None, typer.Option(help='Prompts, one {"prompt": ...} a line.')
    ] = None,
    jsonl_out: Annotated[
        Path | None, typer.Option(help="Write completions there, one JSON object a line.")
    ] = None,
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="Ask for prompts; as without any.")
    ] = False,
) -> None:
    """Complete prompts; colours show how likely the model thought each token."""
    path = find_model(model_dir)
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        stop=tuple(stop or ()),
        seed=seed,
    )
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"--dtype: got {dtype!r}, allowed: float32, bfloat16")
    rows = [{"prompt": text} for text in prompt or ()] + (
        read_prompts(jsonl_in) if jsonl_in else []
    )
    asks = interactive or (not rows and sys.stdin.isatty())
    if not rows and not asks:
        raise ConfigError("nothing to complete; give --prompt TEXT or --jsonl-in FILE")
    with contextlib.ExitStack() as stack:
        file = None
        if jsonl_out is not None:
            file = stack.enter_context(_open_output(jsonl_out, jsonl_in))
        writer = stack.enter_context(Writer(path, config, dtype, chat=chat))
        sources = [row for row in rows for _ in range(n)]
        console = Console()
        show = _show(console) if file is None else _write(file, sources)
        if rows:
            writer.complete([str(row["prompt"]) for row in sources], n, show)
        if asks:
            _converse(writer, n, console)


def _open_output(path: Path, source: Path | None) -> TextIO:
    """Opened before the work, so that a bad path costs none; a file that is there is replaced."""
    if source is not None and path.exists() and path.samefile(source):
        raise ConfigError(
            f"--jsonl-out {str(path)!r}: is the file of --jsonl-in, which it would replace; name "
            "another"
        )
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


class Writer:
    """A model that completes texts, open as long as the context."""

    def __init__(self, path: Path, config: GenerationConfig, dtype: str, *, chat: bool) -> None:
        from tandem.config import InferenceConfig
        from tandem.inference.embedded import EmbeddedBackend
        from tandem.models.loading import load_tokenizer

        self._config = config
        self._chat = chat
        self._asked = 0
        self._tokenizer = load_tokenizer(str(path))
        inference = InferenceConfig.model_validate(
            {"mode": "inprocess", "dtype": dtype, "numerics": "fast"}
        )
        self._backend = EmbeddedBackend(inference, str(path), "generate")

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._backend.close()

    @property
    def is_chat(self) -> bool:
        return self._chat

    def complete(
        self,
        prompts: Sequence[str | list[dict[str, str]]],
        n: int,
        show: Callable[[Completion], None],
    ) -> None:
        """Complete all of ``prompts``, of which ``n`` in a row are the same one, and show them in
        their order, each as soon as it and those before it are there."""
        requests = [
            LLMRequest(str(i), self._encode(item, f"prompt {i // n + 1}"), self._options())
            for i, item in enumerate(prompts)
        ]
        self._backend.start()

        async def run() -> None:
            tasks = [asyncio.create_task(self._backend.generate(item)) for item in requests]
            for index, task in enumerate(tasks):
                show(self._completion(prompts[index], index % n, await task))

        asyncio.run(run())

    def _options(self) -> GenerationConfig:
        index, self._asked = self._asked, self._asked + 1
        seed = self._config.seed
        return self._config if seed is None else self._config.new(seed=seed + index)

    def _completion(
        self, prompt: str | list[dict[str, str]], sample: int, response: LLMResponse
    ) -> Completion:
        return Completion(
            prompt=prompt if isinstance(prompt, str) else "",
            sample=sample,
            text=response.text or "",
            tokens=[str(self._tokenizer.decode([token])) for token in response.output_tokens],
            response=response,
        )

    def _encode(self, prompt: str | list[dict[str, str]], where: str) -> tuple[int, ...]:
        from tandem.data.text import encode, encode_prompt

        if not self._chat and isinstance(prompt, str):
            return encode_prompt(self._tokenizer, prompt, where)
        if not self._tokenizer.chat_template:
            raise ConfigError("--chat: the model has no chat template; leave the option out")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        rendered = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        # The template writes the special tokens itself.
        return encode(self._tokenizer, str(rendered), where)


def _converse(writer: Writer, n: int, console: Console) -> None:
    """Complete line by line until the input ends. A chat goes on from its first completions."""
    messages: list[dict[str, str]] = []
    show = _show(console)
    while True:
        try:
            line = console.input("[bold]> [/bold]")
        except (EOFError, KeyboardInterrupt):
            return
        if not line.strip():
            continue
        made: list[Completion] = []

        def keep(item: Completion, made: list[Completion] = made) -> None:
            made.append(item)
            show(item)

        asked: str | list[dict[str, str]] = line
        if writer.is_chat:
            asked = [*messages, {"role": "user", "content": line}]
        try:
            writer.complete([asked] * n, n, keep)
        except DataError as error:
            console.print(f"[red]{escape(str(error))}[/red]")
            continue
        if isinstance(asked, list):
            messages = [*asked, {"role": "assistant", "content": made[0].text}]


def _write(file: TextIO, sources: Sequence[Mapping[str, Any]]) -> Callable[[Completion], None]:
    rows = iter(sources)

    def write(item: Completion) -> None:
        result = {
            "sample": item.sample,
            "completion": item.text,
            "stop_reason": item.response.stop_reason,
            "output_tokens": item.response.output_tokens,
            "output_logprobs": item.response.output_logprobs,
        }
        file.write(json.dumps({**next(rows), **result}, ensure_ascii=False) + "\n")

    return write


def _show(console: Console) -> Callable[[Completion], None]:
    def show(item: Completion) -> None:
        if not sys.stdout.isatty():
            typer.echo(item.text)
            return
        line = Text(item.prompt, style="dim")
        for token, logprob in zip(item.tokens, item.response.output_logprobs, strict=True):
            line.append(token, style=colour(logprob))
        line.append(f"  ({item.response.stop_reason})", style="dim")
        console.print(line)

    return show


def colour(logprob: float) -> str:
    """Green above probability 0.5, yellow above 0.1, else red."""
    if logprob > -0.6931:
        return "green"
    return "yellow" if logprob > -2.3026 else "red"
