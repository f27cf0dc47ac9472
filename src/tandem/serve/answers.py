"""Answers as OpenAI's clients read them, whole or as a stream of events."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.inference.stopping import TextStream
from tandem.rollout.tool_calls import ToolCall
from tandem.types import LLMResponse

FINISH = {"stop": "stop", "length": "length", "abort": "stop", "tool_calls": "tool_calls"}


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
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for call in self.calls
            ]
        return message


@dataclass(frozen=True, slots=True)
class Answer:
    """All samples of one request, with what its answer has to say about them."""

    id: str
    model: str
    choices: Sequence[Choice]
    prompt_tokens: int
    tokenizer: Any
    with_logprobs: bool
    with_ids: bool
    is_chat: bool

    def whole(self) -> dict[str, Any]:
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {
            **self._head(kind),
            "choices": [self._choice(choice) for choice in self.choices],
            "usage": self.usage(),
        }

    def events(self, *, include_usage: bool) -> Iterator[str]:
        """Server-sent events: pieces of text, then why it ended."""
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        head = self._head(kind)
        for choice in self.choices:
            for part in self._parts(choice):
                yield event_of({**head, "choices": [part]})
        if include_usage:
            yield event_of({**head, "choices": [], "usage": self.usage()})
        yield "data: [DONE]\n\n"

    def usage(self) -> dict[str, int]:
        made = sum(len(choice.response.output_tokens) for choice in self.choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": made,
            "total_tokens": self.prompt_tokens + made,
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": int(time.time()), "model": self.model}

    def _choice(self, choice: Choice) -> dict[str, Any]:
        body: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish_reason}
        if self.is_chat:
            body["message"] = choice.message()
        else:
            body["text"] = choice.text
        body["logprobs"] = self._logprobs(choice.response)
        return body | self._ids(choice.response)

    def _ids(self, response: LLMResponse) -> dict[str, Any]:
        if not self.with_ids:
            return {}
        return {
            "prompt_token_ids": list(response.input_tokens),
            "token_ids": list(response.output_tokens),
            "token_logprobs": list(response.output_logprobs),
            "token_versions": list(response.output_versions),
        }

    def _logprobs(self, response: LLMResponse) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        tokens = [self.tokenizer.decode([token]) for token in response.output_tokens]
        if not self.is_chat:
            return {"tokens": tokens, "token_logprobs": list(response.output_logprobs)}
        return {
            "content": [
                {
                    "token": token,
                    "logprob": logprob,
                    "bytes": list(token.encode("utf-8", "replace")),
                    "top_logprobs": [],
                }
                for token, logprob in zip(tokens, response.output_logprobs, strict=True)
            ]
        }

    def _parts(self, choice: Choice) -> Iterator[dict[str, Any]]:
        index = {"index": choice.index, "finish_reason": None, "logprobs": None}
        end = {
            **index,
            "finish_reason": choice.finish_reason,
            "logprobs": self._logprobs(choice.response),
            **self._ids(choice.response),
        }
        pieces = self._pieces(choice)
        if not self.is_chat:
            yield from ({**index, "text": piece} for piece in pieces)
            yield {**end, "text": ""}
            return
        yield {**index, "delta": {"role": "assistant", "content": ""}}
        yield from ({**index, "delta": {"content": piece}} for piece in pieces)
        if choice.calls:
            calls = choice.message()["tool_calls"]
            numbered = [{"index": number, **call} for number, call in enumerate(calls)]
            yield {**index, "delta": {"tool_calls": numbered}}
        yield {**end, "delta": {}}

    def _pieces(self, choice: Choice) -> Iterator[str]:
        """The text token by token, no piece with half a character; they join to the text."""
        stream = TextStream(self.tokenizer)
        said = [stream.push(token) for token in choice.response.output_tokens] + [stream.finish()]
        if "".join(said) != choice.text:
            # Calls were taken out of it, or a stop string was cut off.
            said = [choice.text]
        return (piece for piece in said if piece)


def event_of(value: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
