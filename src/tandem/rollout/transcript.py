"""The tokens of one trajectory, as the engine saw and sampled them, turn by turn.

What belongs here: copying sampled ids, extending them by what is said in between, and starting a
new row where a chat template rewrites what came before. Who says what is a workflow's matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tandem.data.text import Message, encode, encode_prompt, render_chat
from tandem.data.turns import Tools, continue_chat, without_end
from tandem.errors import DataError
from tandem.types import LLMResponse

Observation = str | Sequence[Message]
"""What is said to the model between two of its turns: text, or chat messages."""


@dataclass(slots=True, eq=False)
class TokenRow:
    """One row of a batch while it grows; all lists have one entry a token."""

    ids: list[int]
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turn_ids: list[int] = field(default_factory=list)
    token_rewards: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, context: Sequence[int], turn: int = 0) -> TokenRow:
        row = cls([])
        row.add_context(context, turn)
        return row

    def add_context(self, ids: Sequence[int], turn: int) -> None:
        """Add tokens that the model is shown: never trained on, made by no version."""
        self._add(ids, False, [0.0] * len(ids), [-1] * len(ids), turn)

    def add_sampled(self, response: LLMResponse, turn: int) -> None:
        ids = response.output_tokens
        self._add(ids, True, response.output_logprobs, response.output_versions, turn)

    def _add(
        self,
        ids: Sequence[int],
        trained: bool,
        logprobs: Sequence[float],
        versions: Sequence[int],
        turn: int,
    ) -> None:
        self.ids += ids
        self.loss_mask += [trained] * len(ids)
        self.logprobs += logprobs
        self.versions += versions
        self.turn_ids += [turn] * len(ids)
        self.token_rewards += [0.0] * len(ids)

    @property
    def num_sampled(self) -> int:
        return sum(self.loss_mask)

    def trim(self) -> None:
        """Drop what follows the last sampled token; a row without one stays as it is."""
        end = len(self.ids)
        while end and not self.loss_mask[end - 1]:
            end -= 1
        if end:
            for values in (self.ids, self.loss_mask, self.logprobs, self.versions):
                del values[end:]
            del self.turn_ids[end:], self.token_rewards[end:]

    def reward_last(self, reward: float) -> None:
        """Give ``reward`` to the last sampled token; a row without one has none to give it to."""
        for index in range(len(self.ids) - 1, -1, -1):
            if self.loss_mask[index]:
                self.token_rewards[index] += reward
                return

    def tensors(self, *, is_trained: bool, has_turns: bool) -> dict[str, torch.Tensor]:
        """What a batch holds of each token; of turns only where they matter."""
        mask = torch.tensor(self.loss_mask, dtype=torch.bool)
        tensors = {
            "input_ids": torch.tensor(self.ids, dtype=torch.int64),
            "loss_mask": mask if is_trained else torch.zeros_like(mask),
            "logprobs": torch.tensor(self.logprobs, dtype=torch.float32),
            "versions": torch.tensor(self.versions, dtype=torch.int64),
        }
        if has_turns:
            tensors["turn_ids"] = torch.tensor(self.turn_ids, dtype=torch.int64)
            tensors["token_rewards"] = torch.tensor(self.token_rewards, dtype=torch.float32)
        return tensors


class Transcript:
    """A conversation with one model, in text and in tokens.

    ``prompt`` is text, or chat messages that the tokenizer's template renders (with ``tools``);
    ``prompt_ids`` are its tokens where they are known already. ``rows`` has one row, and one more
    for every time that the template rewrote the history (``num_splits``): each row's context is
    what the engine saw, and every sampled token is in exactly one row.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: Observation,
        where: str,
        *,
        prompt_ids: Sequence[int] | None = None,
        tools: Tools | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._where = where
        self._tools = tools
        self._ends = {tokenizer.eos_token_id, *stop_token_ids} - {None}
        self._seen = ""
        self.messages: list[Message] = []
        self.turns: list[str] = []
        self.num_splits = 0
        self.last: LLMResponse | None = None
        self.is_chat = not isinstance(prompt, str)
        if isinstance(prompt, str):
            ids = encode_prompt(tokenizer, prompt, where) if prompt_ids is None else prompt_ids
        else:
            self.messages = list(prompt)
            self._seen = render_chat(
                tokenizer, self.messages, where, generation_prompt=True, tools=tools
            )
            ids = encode(tokenizer, self._seen, where) if prompt_ids is None else prompt_ids
        if not ids:
            raise DataError(f"{where}: the prompt is empty")
        self.rows = [TokenRow.of(ids)]

    @property
    def context(self) -> tuple[int, ...]:
        """What the engine is to see next."""
        return tuple(self.rows[-1].ids)

    def add_turn(self, response: LLMResponse) -> str:
        """Take what the model said. Returns its text, special tokens included, without the end."""
        turn = len(self.turns)
        self.rows[-1].add_sampled(response, turn)
        self.last = response
        ids = response.output_tokens
        if ids and ids[-1] in self._ends:
            ids = ids[:-1]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        self.turns.append(text)
        return text

    def add_observation(self, observation: Observation) -> None:
        """Take what is said to the model after its turn; text is a user's message in a chat."""
        assert self.last is not None
        turn = len(self.turns)
        if not self.is_chat:
            ids = encode(self._tokenizer, _as_text(observation), self._where)
            self.rows[-1].add_context(ids, turn)
            return
        new = as_messages(observation)
        spoken = self.turns[-1]
        after = continue_chat(
            self._tokenizer,
            self.messages,
            self._seen,
            spoken,
            new,
            self._where,
            tools=self._tools,
        )
        self.messages += [{"role": "assistant", "content": spoken}, *new]
        self._seen = after.text
        if after.rewrites:
            self.num_splits += 1
            self.rows.append(TokenRow.of(after.ids, turn))
            return
        sampled = self.last.output_tokens
        last = sampled[-1] if sampled else None
        self.rows[-1].add_context(without_end(after.ids, last, self._ends), turn)

    def finish(self) -> None:
        """Drop what was said after the last sampled token: nobody will see it."""
        if len(self.rows) > 1 and not self.rows[-1].num_sampled:
            self.rows.pop()
        self.rows[-1].trim()


def as_messages(observation: Observation) -> list[Message]:
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    return list(observation)


def _as_text(observation: Observation) -> str:
    if isinstance(observation, str):
        return observation
    return "".join(f"\n{message['content']}\n" for message in observation)


def system_messages(prompt: Any) -> list[Message]:
    """The system messages that a prompt of messages begins with."""
    if not isinstance(prompt, list):
        return []
    return [
        message
        for message in prompt
        if isinstance(message, Mapping) and message.get("role") == "system"
    ]
