"""From text and chat messages to token ids, the same way for prompts, answers and evaluation.

What belongs here: templates with ``{column}`` placeholders, the chat template, BOS, and the check
that every character has a token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from tandem.data.sources import Row, missing_columns
from tandem.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]

_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*)\}")


def fill(template: str, row: Row, where: str) -> str:
    """``template`` with every ``{column}`` replaced; ``{{`` and ``}}`` are literal braces.

    Only plain column names are placeholders: no attributes, indices or format specifications.
    """

    def value(match: re.Match[str]) -> str:
        if (name := match.group(1)) is None:
            return match.group()[0]
        return text_of(row, name, where)

    return _PLACEHOLDER.sub(value, template)


def text_of(row: Row, column: str, where: str) -> str:
    """One column as text; numbers are written as Python writes them."""
    if column not in row:
        raise missing_columns(row, repr(column), where)
    found = row[column]
    if not isinstance(found, str | int | float):
        raise DataError(
            f"{where}: column {column!r}: expected text or a number, got {type(found).__name__}"
        )
    return str(found)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str, where: str) -> tuple[int, ...]:
    """Ids of a plain-text prompt: exactly one BOS where the tokenizer adds one, never an EOS."""
    ids = encode(tokenizer, text, where)
    bos = tokenizer.bos_token_id
    added = tokenizer("", add_special_tokens=True)["input_ids"]
    if bos is not None and bos in added and ids[:1] != (bos,):
        return (bos, *ids)
    return ids


def encode(tokenizer: PreTrainedTokenizerBase, text: str, where: str) -> tuple[int, ...]:
    """Ids of ``text`` alone, without added special tokens.

    Raises:
        DataError: a character has no token.
    """
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    unknown = tokenizer.unk_token_id
    if unknown is not None and unknown in ids and str(tokenizer.unk_token) not in text:
        lost = sorted(
            char
            for char in set(text)
            if unknown in tokenizer(char, add_special_tokens=False)["input_ids"]
        )
        raise DataError(
            f"{where}: the tokenizer has no token for {', '.join(map(repr, lost))} in {text!r}; "
            "add it to model.tiny.alphabet or change the data"
        )
    return tuple(ids)


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    where: str,
    *,
    generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """The chat template's text, which holds every special token that the model is to see.

    ``tools`` are JSON schemas of functions that the model may call.

    Raises:
        ConfigError: the tokenizer has no chat template.
        DataError: the template refuses the messages.
    """
    if not tokenizer.chat_template:
        raise ConfigError(
            "data.chat: the tokenizer has no chat template; use data.prompt_template instead"
        )
    try:
        return tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=None if tools is None else [dict(tool) for tool in tools],
            tokenize=False,
            add_generation_prompt=generation_prompt,
        )
    except (TemplateError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{where}: the chat template refuses the messages: {error}") from error


def tools_of(row: Row, where: str) -> list[Mapping[str, Any]] | None:
    """The JSON schemas in the column ``tools`` (a list, or JSON text of one), None without any.

    Raises:
        DataError: the column holds something else.
    """
    value = row.get("tools")
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise DataError(f"{where}: column 'tools' is not JSON: {error}") from None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise DataError(f"{where}: column 'tools': expected a list of objects, got {value!r:.80}")
    return value


def check_messages(value: object, where: str) -> list[Message]:
    """``value`` as a non-empty list of messages with a role and content."""
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: messages: expected a non-empty list, got {value!r:.80}")
    for index, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(
                f"{where}: messages[{index}]: expected an object with role and content, "
                f"got {message!r:.80}"
            )
        if "content" not in message:
            raise DataError(f"{where}: messages[{index}] has no content")
    return value
