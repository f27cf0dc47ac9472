"""How a chat goes on: what a template writes after a turn that the model has already spoken.

What belongs here: the tokens between two assistant turns, and noticing that a template would change
what came before. Whole conversations as training rows are in ``demonstrations.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from tandem.data.text import Message, encode, render_chat
from tandem.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Continuation:
    """What the engine is to see next.

    ``ids`` follow the sampled turn; with ``rewrites`` they are instead the whole conversation,
    because the template no longer shows it as it was generated. ``text`` is the whole conversation
    as rendered.
    """

    text: str
    ids: tuple[int, ...]
    rewrites: bool


def continue_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    seen: str,
    spoken: str,
    new: Sequence[Message],
    where: str,
    *,
    tools: Tools | None = None,
) -> Continuation:
    """Go on after ``spoken``, which the model said to ``messages``, rendered as ``seen``.

    Nothing that was sampled is tokenised again: only the text that the template writes after the
    turn is. A template that changes nothing but white space does not rewrite.

    Raises:
        DataError: the template refuses the messages, or drops what an assistant says.
    """
    turn = {"role": "assistant", "content": spoken}
    text = render_chat(
        tokenizer, [*messages, turn, *new], where, generation_prompt=True, tools=tools
    )
    if not _squeezed(text).startswith(_squeezed(seen + spoken)):
        return Continuation(text, encode(tokenizer, text, where), rewrites=True)
    suffix = _after_turn(tokenizer, messages, new, where, tools)
    return Continuation(text, encode(tokenizer, suffix, where), rewrites=False)


def _after_turn(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    new: Sequence[Message],
    where: str,
    tools: Tools | None,
) -> str:
    """What the template writes after the content of an assistant turn, whatever that content is."""
    others = repr((messages, new))
    mark = next(name for n in count() if (name := f"turn{n}text") not in others)
    turn = {"role": "assistant", "content": mark}
    text = render_chat(
        tokenizer, [*messages, turn, *new], where, generation_prompt=True, tools=tools
    )
    _, found, suffix = text.rpartition(mark)
    if not found:
        raise DataError(f"{where}: the chat template does not show what an assistant message says")
    return suffix


def without_end(ids: Sequence[int], last: int | None, ends: Collection[int]) -> Sequence[int]:
    """``ids`` without a leading end of turn when ``last``, the last sampled token, is one."""
    return ids[1:] if last in ends and ids and ids[0] in ends else ids


def _squeezed(text: str) -> str:
    return "".join(text.split())
