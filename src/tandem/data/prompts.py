"""Prompt streams for rollout and evaluation: rendered once, addressable, resumable.

What belongs here: from a ``DataConfig`` and a tokenizer to ``Prompt`` objects. Reading files is in
``sources.py``, the visiting order in ``order.py``, demonstrations in ``demonstrations.py``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tandem.config.schema import DataConfig
from tandem.data.order import ShuffledOrder
from tandem.data.sources import Row, missing_columns, read_rows
from tandem.data.text import (
    Message,
    check_messages,
    encode,
    encode_prompt,
    fill,
    render_chat,
    text_of,
    tools_of,
)
from tandem.errors import ConfigError, DataError
from tandem.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Overlong = Literal["error", "filter", "truncate_left", "truncate_right"]


class PromptSource:
    """Prompts in an order that is a function of (seed, epoch), with a cursor that is resumable.

    ``prompt(epoch, position)`` is random access and leaves the cursor alone; iterating never ends
    and moves the cursor as each prompt is handed out. ``dropped`` counts rows filtered for length.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        seed: tuple[int, ...] = (0,),
        shuffle: bool = True,
        dropped: int = 0,
    ) -> None:
        if not rows:
            raise DataError("a prompt source needs at least one row")
        self._rows = rows
        self.dropped = dropped
        digest = ids_digest(row.get("prompt_ids", ()) for row in rows)
        self._order = ShuffledOrder(len(rows), seed=seed, shuffle=shuffle, digest=digest)

    def __len__(self) -> int:
        return len(self._rows)

    def prompt(self, epoch: int, position: int) -> Prompt:
        """The prompt at an address, ``0 <= position < len(self)``."""
        return Prompt(epoch, position, self._rows[self._order.row(epoch, position)])

    def all(self) -> list[Prompt]:
        """Every prompt once, in the order of the source, as for evaluation."""
        return [Prompt(0, index, row) for index, row in enumerate(self._rows)]

    @property
    def address(self) -> tuple[int, int]:
        """(epoch, position) of the prompt that ``next`` returns."""
        return self._order.address

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        return self.prompt(*self._order.advance())

    def state_dict(self) -> dict[str, Any]:
        return self._order.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken; ``DataError`` when the data have changed."""
        self._order.load_state_dict(state)


def open_prompts(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int = 0,
    max_prompt_tokens: int | None = None,
    overlong: Overlong = "error",
) -> PromptSource:
    """Read, render and tokenise every prompt of a data source.

    Each prompt's data are the row's columns plus ``prompt`` (text or messages) and ``prompt_ids``.

    Raises:
        ConfigError: a setting that the tokenizer or the task cannot honour.
        DataError: bad data (see ``sources.read_rows``), a character without a token, a prompt
            longer than ``max_prompt_tokens`` under ``overlong="error"``, or no prompt left.
    """
    source = read_rows(config)
    rows: list[Row] = []
    for index, row in enumerate(source.rows):
        where = source.where(index)
        prompt, ids = render_prompt(row, config, tokenizer, where)
        fitted = fit_prompt(ids, max_prompt_tokens, overlong, where)
        if fitted is not None:
            rows.append({**row, "prompt": prompt, "prompt_ids": fitted})
    if not rows:
        raise DataError(
            f"{source.name}: all {len(source)} prompts are longer than {max_prompt_tokens} tokens"
        )
    return PromptSource(
        rows, seed=(seed, config.seed), shuffle=config.shuffle, dropped=len(source) - len(rows)
    )


def render_prompt(
    row: Row, config: DataConfig, tokenizer: PreTrainedTokenizerBase, where: str
) -> tuple[str | list[Message], tuple[int, ...]]:
    """The prompt as the row has it (text or messages), and its token ids."""
    prompt = _prompt_of(row, config, where)
    if isinstance(prompt, str):
        ids = encode_prompt(tokenizer, prompt, where)
    else:
        tools = tools_of(row, where)
        text = render_chat(tokenizer, prompt, where, generation_prompt=True, tools=tools)
        ids = encode(tokenizer, text, where)
    if not ids:
        raise DataError(f"{where}: the prompt is empty")
    return prompt, ids


def fit_prompt(
    ids: tuple[int, ...], limit: int | None, policy: Overlong, where: str
) -> tuple[int, ...] | None:
    """``ids`` within ``limit`` tokens by ``policy``; ``None`` when the prompt is to be dropped.

    ``truncate_left`` keeps the end of the prompt, ``truncate_right`` its beginning.
    """
    if limit is None or len(ids) <= limit:
        return ids
    if policy == "filter":
        return None
    if policy == "truncate_left":
        return ids[len(ids) - limit :]
    if policy == "truncate_right":
        return ids[:limit]
    raise DataError(
        f"{where}: the prompt has {len(ids)} tokens > {limit} allowed; raise max_prompt_tokens or "
        "set overlong_prompt to filter, truncate_left or truncate_right"
    )


def _prompt_of(row: Row, config: DataConfig, where: str) -> str | list[Message]:
    system: list[Message] = []
    if config.system_prompt is not None:
        system = [{"role": "system", "content": config.system_prompt}]
    if config.prompt_template is not None:
        text = fill(config.prompt_template, row, where)
    else:
        column = next((name for name in ("prompt", "question", "messages") if name in row), None)
        if column is None:
            raise missing_columns(row, "'prompt' (or 'question', or 'messages')", where)
        if not isinstance(row[column], str | int | float):
            return [*system, *check_messages(row[column], where)]
        text = text_of(row, column, where)
    if config.chat:
        return [*system, {"role": "user", "content": text}]
    if system:
        raise ConfigError("data.system_prompt needs data.chat=true, or messages in the data")
    return text


def ids_digest(rows: Any) -> str:
    """A short hash of token rows, with which a resume notices that the data have changed."""
    digest = hashlib.sha256()
    for ids in rows:
        digest.update(np.asarray([len(ids), *ids], dtype="<i8").tobytes())
    return digest.hexdigest()[:16]
