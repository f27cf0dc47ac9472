"""What one agent asked and was answered, as a tree of token sequences.

A request that begins with an earlier answer goes on from its very ids. The branches become the rows
of a trajectory: every sampled token is trained on in exactly one of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.data.text import Message, encode, encode_prompt, render_chat
from tandem.data.turns import Tools, continue_chat, without_end
from tandem.rollout.transcript import TokenRow
from tandem.types import LLMResponse


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """One request in tokens. ``parent`` is the answer that ``context`` begins with, if any does.

    ``seen`` is its text; None where the client gave token ids.
    """

    parent: Node | None
    context: tuple[int, ...]
    messages: tuple[Message, ...] = ()
    seen: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One answer: what was asked, what was sampled, and its text with special tokens.

    ``number`` is that of the request, ``index`` that of the sample in it.
    """

    asked: Asked
    response: LLMResponse
    spoken: str
    number: int
    index: int

    @property
    def ids(self) -> tuple[int, ...]:
        return (*self.asked.context, *self.response.output_tokens)


class ConversationTree:
    """The answers of one episode. Answers may arrive while rows are made: they are left out."""

    def __init__(self, tokenizer: Any, where: str, *, stop_token_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._where = where
        self.ends = {tokenizer.eos_token_id, *stop_token_ids} - {None}
        self._by_messages: dict[str, Node] = {}
        self.nodes: list[Node] = []
        self.num_splits = 0

    # --- asking -----------------------------------------------------------------------------------

    def ask_chat(
        self, told: Sequence[Mapping[str, Any]], messages: Sequence[Message], tools: Tools | None
    ) -> Asked:
        """``told`` are the messages as the client knows them, ``messages`` as a template does."""
        for length in range(len(told) - 1, 0, -1):
            if told[length - 1]["role"] != "assistant":
                continue
            node = self._by_messages.get(_key(told[:length], tools))
            if node is not None:
                return self._go_on(node, messages[length:], tools)
        text = render_chat(
            self._tokenizer, messages, self._where, generation_prompt=True, tools=tools
        )
        return Asked(None, encode(self._tokenizer, text, self._where), tuple(messages), text)

    def _go_on(self, node: Node, new: Sequence[Message], tools: Tools | None) -> Asked:
        asked = node.asked
        assert asked.seen is not None
        after = continue_chat(
            self._tokenizer,
            asked.messages,
            asked.seen,
            node.spoken,
            new,
            self._where,
            tools=tools,
        )
        messages = (*asked.messages, {"role": "assistant", "content": node.spoken}, *new)
        if after.rewrites:
            self.num_splits += 1
            return Asked(None, after.ids, messages, after.text)
        sampled = node.response.output_tokens
        suffix = without_end(after.ids, sampled[-1] if sampled else None, self.ends)
        return Asked(node, (*node.ids, *suffix), messages, after.text)

    def ask_text(self, prompt: str | Sequence[int]) -> Asked:
        """A plain prompt; one that begins with an earlier prompt and its answer goes on from it."""
        if not isinstance(prompt, str):
            ids = tuple(prompt)
            begun = [node for node in self.nodes if ids[: len(node.ids)] == node.ids]
            return Asked(_longest(begun), ids)
        texts = {
            node: node.asked.seen + node.spoken
            for node in self.nodes
            if node.asked.seen is not None and not node.asked.messages
        }
        node = _longest([node for node, text in texts.items() if prompt.startswith(text)])
        if node is None:
            ids = encode_prompt(self._tokenizer, prompt, self._where)
            return Asked(None, ids, seen=prompt)
        rest = prompt[len(texts[node]) :]
        return Asked(node, (*node.ids, *encode(self._tokenizer, rest, self._where)), seen=prompt)

    # --- answers ----------------------------------------------------------------------------------

    def spoken(self, response: LLMResponse) -> str:
        """The text of an answer, special tokens included, without the end of turn."""
        ids = response.output_tokens
        if ids and ids[-1] in self.ends:
            ids = ids[:-1]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def add(self, asked: Asked, response: LLMResponse, number: int, index: int) -> Node:
        node = Node(asked, response, self.spoken(response), number, index)
        self.nodes.append(node)
        return node

    def remember(self, node: Node, told: Sequence[Mapping[str, Any]], tools: Tools | None) -> None:
        """``told`` ends with what the client was answered; of equal answers the first is meant."""
        self._by_messages.setdefault(_key(told, tools), node)

    # --- rows -------------------------------------------------------------------------------------

    def rows(self) -> list[TokenRow]:
        """One row for every answer that nothing went on from, in order of the requests."""
        nodes = self.in_order()
        parents = {id(node.asked.parent) for node in nodes}
        trained: set[int] = set()
        leaves = [node for node in nodes if id(node) not in parents]
        rows = [self._row(node, trained) for node in leaves]
        return [row for row in rows if row.num_sampled] or rows[:1]

    def in_order(self) -> list[Node]:
        """By number of the request and of the sample."""
        return sorted(self.nodes, key=lambda node: (node.number, node.index))

    def _row(self, leaf: Node, trained: set[int]) -> TokenRow:
        path = [leaf]
        while (parent := path[-1].asked.parent) is not None:
            path.append(parent)
        row = TokenRow([])
        for node in reversed(path):
            row.add_context(node.asked.context[len(row.ids) :], node.number)
            if id(node) in trained:
                row.add_context(node.response.output_tokens, node.number)
            else:
                row.add_sampled(node.response, node.number)
                trained.add(id(node))
        return row


def _longest(nodes: Sequence[Node]) -> Node | None:
    return max(nodes, key=lambda node: len(node.ids), default=None)


def _key(told: Sequence[Mapping[str, Any]], tools: Tools | None) -> str:
    text = json.dumps([list(told), tools], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
