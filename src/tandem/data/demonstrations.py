"""Demonstrations for supervised training: token rows that know which tokens are targets.

What belongs here: prompt-and-answer rows and chat conversations as ids with a loss mask, and the
``max_length`` policy. Their order is in ``examples.py``, putting them into tensors in ``batch.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING

from tandem.config.schema import DataConfig, SFTStageConfig, StageConfig
from tandem.data.examples import ExampleSource
from tandem.data.noise import load_noise
from tandem.data.prompts import ids_digest, render_prompt
from tandem.data.sources import Row, Rows, missing_columns, read_rows
from tandem.data.text import (
    Message,
    check_messages,
    encode,
    fill,
    render_chat,
    text_of,
    tools_of,
)
from tandem.data.turns import Tools
from tandem.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWER_COLUMNS = ("answer", "response", "completion")


@dataclass(frozen=True, slots=True)
class Demonstration:
    """Token ids of one row; ``loss_mask[t]`` says whether token t is a target (never token 0)."""

    input_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


def open_demonstrations(
    config: SFTStageConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int = 0
) -> ExampleSource[Demonstration]:
    """Read and tokenise every demonstration of a supervised stage.

    A row has ``messages``, or a prompt (as for ``open_prompts``) and an ``answer`` (or
    ``response``, or ``completion``), which may be chat messages too. The mistakes of
    ``data.answer_noise`` are a function of (seed, row), the same in every epoch.

    Raises:
        ConfigError: a setting that the tokenizer or the task cannot honour.
        DataError: bad data, a row longer than ``max_length`` under ``overlong="error"``, or no
            usable row left.
    """
    source = read_rows(config.data)
    limit = min(config.max_length, config.train.max_tokens_per_microbatch)
    noise = None
    if config.data.answer_noise is not None:
        noise = load_noise(config.data.answer_noise, config.data.answer_noise_kwargs)
    dropped: Counter[str] = Counter()
    rows: list[Demonstration] = []
    for index, row in enumerate(source.rows):
        where = source.where(index)
        if noise is not None:
            if _is_conversation(row, config.data):
                raise ConfigError("data.answer_noise needs rows with an answer, not messages")
            rng = Random(f"{seed}:{config.data.seed}:{index}")
            row = {**row, _answer_column(row, where): noise(row, rng)}
        for demonstration in row_demonstrations(row, config.data, tokenizer, where):
            if not config.completion_only:
                length = len(demonstration.input_ids)
                demonstration = replace(demonstration, loss_mask=(False, *[True] * (length - 1)))
            fitted = fit_row(demonstration, limit, config.overlong, where, dropped)
            if fitted is not None:
                rows.append(fitted)
    if not rows:
        raise nothing_usable(source, config, dropped)
    return ExampleSource(
        rows,
        digest=ids_digest(row.input_ids for row in rows),
        seed=(seed, config.data.seed),
        shuffle=config.data.shuffle,
        dropped=dropped,
    )


def conversation(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    *,
    tools: Tools | None = None,
    first_target: int = 0,
) -> Demonstration:
    """``conversation_rows`` where only one row will do.

    Raises:
        DataError: also for a template that renders the beginning of a conversation differently once
            the conversation goes on.
    """
    rows = conversation_rows(messages, tokenizer, where, tools=tools, first_target=first_target)
    if len(rows) > 1:
        raise DataError(
            f"{where}: the chat template rewrites earlier turns as the conversation goes on, which "
            f"makes {len(rows)} rows of it where one is needed; split the conversation into one "
            "row per assistant turn or change the template"
        )
    return rows[0]


def conversation_rows(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    *,
    tools: Tools | None = None,
    first_target: int = 0,
) -> list[Demonstration]:
    """A chat conversation: what the assistant says, its end-of-turn token included, is a target.

    The ids up to an assistant turn are those of the rendered prompt of that turn, so training sees
    what generation sees. Whatever follows the last target is cut off. A template that rewrites
    earlier turns once the conversation goes on makes several rows, one for each stretch that it
    leaves alone; every turn is a target exactly once. Messages before number
    ``first_target`` are the prompt, assistant turns among them included.

    Raises:
        DataError: no assistant message, or a turn whose rendering does not begin with its prompt.
    """
    rows = [_Stretch()]
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index < first_target:
            continue
        before = render_chat(
            tokenizer, messages[:index], where, generation_prompt=True, tools=tools
        )
        after = render_chat(
            tokenizer, messages[: index + 1], where, generation_prompt=False, tools=tools
        )
        if not after.startswith(before):
            raise DataError(
                f"{where}: the chat template does not render messages[{index}] after the prompt "
                "that asks for it, so the assistant's tokens cannot be told apart; change the "
                "template"
            )
        if not before.startswith(rows[-1].text):
            rows.append(_Stretch())
        rows[-1].add(tokenizer, before, after, where)
    found = [row.finish(tokenizer) for row in rows if any(row.mask)]
    if not found:
        raise DataError(f"{where}: messages: no assistant message to learn from")
    return found


@dataclass
class _Stretch:
    """Turns that a template renders one after another without changing what came before."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)

    def add(self, tokenizer: PreTrainedTokenizerBase, before: str, after: str, where: str) -> None:
        context = encode(tokenizer, before[len(self.text) :], where)
        turn = encode(tokenizer, after[len(before) :], where)
        spoken = _spoken(turn, tokenizer.eos_token_id)
        self.ids += [*context, *turn]
        self.mask += [False] * len(context) + [i < spoken for i in range(len(turn))]
        self.text = after

    def finish(self, tokenizer: PreTrainedTokenizerBase) -> Demonstration:
        end = len(self.mask) - self.mask[::-1].index(True)
        ids, mask = self.ids[:end], self.mask[:end]
        if ids[-1] != tokenizer.eos_token_id:
            ids, mask = [*ids, int(tokenizer.eos_token_id)], [*mask, True]
        return masked(ids, mask)


def _spoken(turn: tuple[int, ...], eos: int | None) -> int:
    """Tokens of a rendered turn up to its EOS, or all of it where the template writes none."""
    return turn.index(eos) + 1 if eos in turn else len(turn)


def row_demonstrations(
    row: Row, config: DataConfig, tokenizer: PreTrainedTokenizerBase, where: str
) -> list[Demonstration]:
    """One row of a data source as token rows, of any length."""
    tools = tools_of(row, where)
    if _is_conversation(row, config):
        messages = check_messages(row["messages"], where)
        if config.system_prompt is not None:
            messages = [{"role": "system", "content": config.system_prompt}, *messages]
        return conversation_rows(messages, tokenizer, where, tools=tools)
    column = _answer_column(row, where)
    prompt, prompt_ids = render_prompt(row, config, tokenizer, where)
    if isinstance(row[column], list) and config.answer_template is None:
        if isinstance(prompt, str):
            raise DataError(
                f"{where}: column {column!r} holds messages and the prompt is text; give both as "
                "messages, or set data.chat=true"
            )
        spoken = check_messages(row[column], where)
        return conversation_rows(
            [*prompt, *spoken], tokenizer, where, tools=tools, first_target=len(prompt)
        )
    template = "{" + column + "}" if config.answer_template is None else config.answer_template
    answer = fill(template, row, where)
    if not isinstance(prompt, str):
        turn: Message = {"role": "assistant", "content": answer}
        return conversation_rows(
            [*prompt, turn], tokenizer, where, tools=tools, first_target=len(prompt)
        )
    completion = (*encode(tokenizer, answer, where), int(tokenizer.eos_token_id))
    mask = [False] * len(prompt_ids) + [True] * len(completion)
    return [masked([*prompt_ids, *completion], mask)]


def _is_conversation(row: Row, config: DataConfig) -> bool:
    return "messages" in row and config.prompt_template is None and "prompt" not in row


def _answer_column(row: Row, where: str) -> str:
    for column in ANSWER_COLUMNS:
        if column in row:
            if not isinstance(row[column], list):
                text_of(row, column, where)
            return column
    raise missing_columns(row, "'answer' (or 'response', 'completion', or 'messages')", where)


def masked(ids: Sequence[int], mask: Sequence[bool]) -> Demonstration:
    """A row of ``ids``; its first token is never a target."""
    return Demonstration(tuple(ids), (False, *mask[1:]))


def fit_row(
    row: Demonstration, limit: int, policy: str, where: str, dropped: Counter[str]
) -> Demonstration | None:
    """The row within ``limit`` tokens by ``policy`` (``overlong`` of a stage), or None: dropped."""
    if len(row.input_ids) > limit:
        if policy == "error":
            raise DataError(
                f"{where}: the demonstration has {len(row.input_ids)} tokens > {limit} allowed; "
                "raise max_length (or train.max_tokens_per_microbatch), or set overlong to filter "
                "or truncate"
            )
        if policy == "filter":
            dropped["too long"] += 1
            return None
        row = Demonstration(row.input_ids[:limit], row.loss_mask[:limit])
    if not any(row.loss_mask):
        dropped["no target token left"] += 1
        return None
    return row


def nothing_usable(source: Rows, config: StageConfig, dropped: Counter[str]) -> DataError:
    """The error for a stage none of whose rows is left."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
    return DataError(
        f"{source.name}: none of {len(source)} rows is usable ({reasons}); "
        f"raise max_length (now {config.max_length})"
    )
