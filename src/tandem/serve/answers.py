"""Answers as OpenAI's clients read them, and the chunks that a stream of them is made of."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.rollout.tool_calls import ToolCall
from tandem.types import LLMResponse

FINISH = {"stop": "stop", "length": "length", "abort": "stop", "tool_calls": "tool_calls"}
DONE = "data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Head:
    """What all parts of one answer share."""

    model: str
    is_chat: bool
    with_logprobs: bool
    created: int = field(default_factory=lambda: int(time.time()))
    name: str = field(default_factory=lambda: secrets.token_hex(12))

    def whole(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return self._of("chat.completion" if self.is_chat else "text_completion", choices)

    def chunk(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return self._of("chat.completion.chunk" if self.is_chat else "text_completion", choices)

    def _of(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.name}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
        }

    def logprobs(
        self, tokenizer: Any, ids: Sequence[int], logprobs: Sequence[float]
    ) -> dict[str, Any] | None:
        """Of tokens, if the client asked for them."""
        if not self.with_logprobs:
            return None
        tokens = [tokenizer.decode([token]) for token in ids]
        if not self.is_chat:
            return {"tokens": tokens, "token_logprobs": list(logprobs)}
        return {
            "content": [
                {
                    "token": token,
                    "logprob": logprob,
                    "bytes": list(token.encode("utf-8", "replace")),
                    "top_logprobs": [],
                }
                for token, logprob in zip(tokens, logprobs, strict=True)
            ]
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """One sample: its text as the client sees it, its calls, and how it came about."""

    index: int
    text: str
    calls: tuple[ToolCall, ...]
    response: LLMResponse

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.calls else FINISH[self.response.stop_reason]

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.calls:
            message["content"] = self.text or None
            message["tool_calls"] = self.calls_told()
        return message

    def calls_told(self) -> list[dict[str, Any]]:
        return [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call in self.calls
        ]


@dataclass(frozen=True, slots=True)
class Answer:
    """All samples of one request, with what its answer has to say about them."""

    head: Head
    choices: Sequence[Choice]
    prompt_tokens: int
    tokenizer: Any
    with_ids: bool

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(choice) for choice in self.choices]
        return {**self.head.whole(choices), "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        made = sum(len(choice.response.output_tokens) for choice in self.choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": made,
            "total_tokens": self.prompt_tokens + made,
        }

    def _choice(self, choice: Choice) -> dict[str, Any]:
        body: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish_reason}
        if self.head.is_chat:
            body["message"] = choice.message()
        else:
            body["text"] = choice.text
        made = choice.response
        body["logprobs"] = self.head.logprobs(
            self.tokenizer, made.output_tokens, made.output_logprobs
        )
        return body | self.ids(made)

    def ids(self, response: LLMResponse) -> dict[str, Any]:
        """Ids, log-probabilities and versions of a whole sample, if the client asked for them."""
        if not self.with_ids:
            return {}
        return {
            "prompt_token_ids": list(response.input_tokens),
            "token_ids": list(response.output_tokens),
            "token_logprobs": list(response.output_logprobs),
            "token_versions": list(response.output_versions),
        }


def piece_choice(
    index: int,
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    *,
    is_chat: bool = True,
) -> dict[str, Any]:
    """A part of a sample in a chunk; of a text completion only the ``content`` of ``delta``."""
    said = {"delta": delta} if is_chat else {"text": delta.get("content", "")}
    return {"index": index, **said, "finish_reason": None, "logprobs": logprobs}


def finish_choice(
    answer: Answer, choice: Choice, logprobs: dict[str, Any] | None
) -> dict[str, Any]:
    """The last part of a sample in a stream."""
    last = piece_choice(choice.index, {}, logprobs, is_chat=answer.head.is_chat)
    return {**last, "finish_reason": choice.finish_reason, **answer.ids(choice.response)}


def event_of(value: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
