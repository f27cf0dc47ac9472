"""Demonstrations for supervised training: token rows that know which tokens are targets.

What belongs here: prompt-and-answer rows and chat conversations as ids with a loss mask, and the
``max_length`` policy. Their order is in ``examples.py``, putting them into tensors in ``batch.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from tandem.config.schema import DataConfig, SFTStageConfig, StageConfig
from tandem.data.examples import ExampleSource
from tandem.data.noise import load_noise
from tandem.data.prompts import ids_digest, render_prompt
from tandem.data.sources import Row, Rows, missing_columns, read_rows
from tandem.data.text import Message, check_messages, encode, fill, render_chat, text_of
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
    ``response``, or ``completion``). The mistakes of ``data.answer_noise`` are a function of
    (seed, row), the same in every epoch.

    Raises:
        ConfigError: a setting that the tokenizer or the task cannot honour.
        DataError: bad data, a row longer than ``max_length`` under ``overlong="error"``, or no
            usable row left.
    """
    source = read_rows(config.data)
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
        demonstration = _tokenise(row, config.data, tokenizer, where)
        if not config.completion_only:
            length = len(demonstration.input_ids)
            demonstration = replace(demonstration, loss_mask=(False, *[True] * (length - 1)))
        limit = min(config.max_length, config.train.max_tokens_per_microbatch)
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
    first_target: int = 0,
) -> Demonstration:
    """A chat conversation: what the assistant says, its end-of-turn token included, is a target.

    Messages before number ``first_target`` are the prompt, assistant turns among them included.

    The ids up to an assistant turn are those of the rendered prompt of that turn, so training sees
    what generation sees. Whatever follows the last target is cut off.

    Raises:
        DataError: no assistant message, or a template that renders the beginning of a conversation
            differently once the conversation goes on.
    """
    ids: list[int] = []
    mask: list[bool] = []
    done = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index < first_target:
            continue
        before = render_chat(tokenizer, messages[:index], where, generation_prompt=True)
        after = render_chat(tokenizer, messages[: index + 1], where, generation_prompt=False)
        if not (before.startswith(done) and after.startswith(before)):
            raise DataError(
                f"{where}: the chat template does not extend the conversation at messages[{index}] "
                "(it rewrites earlier turns), so the assistant's tokens cannot be told apart; "
                "split the conversation into one row per assistant turn or change the template"
            )
        context = encode(tokenizer, before[len(done) :], where)
        turn = encode(tokenizer, after[len(before) :], where)
        spoken = _spoken(turn, tokenizer.eos_token_id)
        ids += [*context, *turn]
        mask += [False] * len(context) + [i < spoken for i in range(len(turn))]
        done = after
    if not any(mask):
        raise DataError(f"{where}: messages: no assistant message to learn from")
    end = len(mask) - mask[::-1].index(True)
    ids, mask = ids[:end], mask[:end]
    if ids[-1] != tokenizer.eos_token_id:
        ids, mask = [*ids, int(tokenizer.eos_token_id)], [*mask, True]
    return masked(ids, mask)


def _spoken(turn: tuple[int, ...], eos: int | None) -> int:
    """Tokens of a rendered turn up to its EOS, or all of it where the template writes none."""
    return turn.index(eos) + 1 if eos in turn else len(turn)


def _tokenise(
    row: Row, config: DataConfig, tokenizer: PreTrainedTokenizerBase, where: str
) -> Demonstration:
    if _is_conversation(row, config):
        messages = check_messages(row["messages"], where)
        if config.system_prompt is not None:
            messages = [{"role": "system", "content": config.system_prompt}, *messages]
        return conversation(messages, tokenizer, where)
    column = _answer_column(row, where)
    template = "{" + column + "}" if config.answer_template is None else config.answer_template
    answer = fill(template, row, where)
    prompt, prompt_ids = render_prompt(row, config, tokenizer, where)
    if not isinstance(prompt, str):
        spoken: Message = {"role": "assistant", "content": answer}
        return conversation([*prompt, spoken], tokenizer, where)
    completion = (*encode(tokenizer, answer, where), int(tokenizer.eos_token_id))
    mask = [False] * len(prompt_ids) + [True] * len(completion)
    return masked([*prompt_ids, *completion], mask)


def _is_conversation(row: Row, config: DataConfig) -> bool:
    return "messages" in row and config.prompt_template is None and "prompt" not in row


def _answer_column(row: Row, where: str) -> str:
    for column in ANSWER_COLUMNS:
        if column in row:
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
