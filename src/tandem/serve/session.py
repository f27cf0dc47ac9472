"""One episode's view of the engine: requests in, answers out, everything remembered in tokens."""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from tandem.data.text import Message
from tandem.data.turns import Tools
from tandem.errors import ConfigError, DataError
from tandem.rollout.tool_calls import ToolCall, ToolFormat, parse_tool_calls
from tandem.serve.answers import Answer, Choice, Head
from tandem.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    MessageIn,
    Sampling,
    generation_of,
)
from tandem.serve.streaming import GrowingText
from tandem.serve.strict import RequestError
from tandem.serve.tree import Asked, ConversationTree
from tandem.types import GenerationConfig, LLMRequest, LLMResponse

if TYPE_CHECKING:
    from tandem.rollout.engine import InferenceEngine

SeedOf = Callable[[int, int], int | None]
"""Seed of (number of the request, number of the sample)."""
Hear = Callable[[int, Sequence[int], Sequence[float], Sequence[int]], None]
"""Told of a sample's number and its new tokens, as ``OnTokens`` is."""


@dataclass(eq=False)
class Session:
    """What one key may do. ``keeps`` is False for plain serving: nothing is remembered.

    ``context`` is the context of the episode's task, so that the executor knows whose request it
    is. Answers under way are cancelled by ``close``, later requests refused. Without ``model`` any
    name of one is taken, since programs often have one written into them.
    """

    engine: InferenceEngine
    tokenizer: Any
    generation: GenerationConfig
    name: str
    seed_of: SeedOf
    sampling: Sampling = "fixed"
    tool_format: ToolFormat = "auto"
    keeps: bool = True
    model: str | None = None
    id: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    key: str = field(default_factory=lambda: f"tandem-{secrets.token_urlsafe(24)}")
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    is_closed: bool = False

    def __post_init__(self) -> None:
        self.tree = ConversationTree(
            self.tokenizer, self.name, stop_token_ids=self.generation.stop_token_ids
        )
        self._num_requests = 0
        self._running: set[asyncio.Task[LLMResponse]] = set()

    def check_model(self, name: str) -> None:
        """Raises: RequestError: another model is served."""
        if self.model not in (None, name):
            raise RequestError(
                404,
                f"model: got {name[:80]!r}, allowed: {self.model}",
                param="model",
                code="model_not_found",
            )

    async def chat(self, request: ChatRequest, head: Head, hear: Hear | None = None) -> Answer:
        """Answer a chat; ``hear`` is told of tokens as they come.

        Raises:
            RequestError: it cannot be answered as asked.
        """
        if request.messages[-1].role == "assistant":
            raise RequestError(400, "messages: the last one is an assistant's", param="messages")
        tools = request.schemas
        told = [_told(message) for message in request.messages]
        asked = self._asked(
            lambda: self.tree.ask_chat(told, [_shown(m) for m in request.messages], tools)
        )
        number, responses = await self._generate(asked, request, hear)
        choices = [self._choice(i, response, tools) for i, response in enumerate(responses)]
        if self.keeps:
            for choice in choices:
                node = self.tree.add(asked, choice.response, number, choice.index)
                self.tree.remember(node, [*told, _told_back(choice)], tools)
        return self._answer(request, head, asked, choices)

    async def complete(
        self, request: CompletionRequest, head: Head, hear: Hear | None = None
    ) -> Answer:
        """Complete a text or token ids; ``hear`` is told of tokens as they come.

        Raises:
            RequestError: it cannot be answered as asked.
        """
        asked = self._asked(lambda: self.tree.ask_text(request.prompt))
        number, responses = await self._generate(asked, request, hear)
        if self.keeps:
            for index, response in enumerate(responses):
                self.tree.add(asked, response, number, index)
        choices = [self._choice(i, response, None) for i, response in enumerate(responses)]
        return self._answer(request, head, asked, choices)

    def texts(self, request: ChatRequest | CompletionRequest) -> list[GrowingText]:
        """For each sample of a request, what becomes its text."""
        config = generation_of(request, self.generation, self.sampling)
        has_tools = isinstance(request, ChatRequest) and bool(request.schemas)
        return [
            GrowingText(self.tokenizer, ends=self.tree.ends, stop=config.stop, has_tools=has_tools)
            for _ in range(request.n)
        ]

    def close(self) -> None:
        """Refuse what comes later and cancel what runs; from the gateway's event loop."""
        self.is_closed = True
        for task in self._running:
            task.cancel()

    def _asked(self, function: Callable[[], Asked]) -> Asked:
        try:
            return function()
        except (DataError, ConfigError) as error:
            raise RequestError(400, str(error)) from None

    async def _generate(
        self, asked: Asked, request: ChatRequest | CompletionRequest, hear: Hear | None
    ) -> tuple[int, list[LLMResponse]]:
        """The number of this request, and its samples."""
        config = generation_of(request, self.generation, self.sampling)
        number = self._num_requests
        self._num_requests += 1
        loop = asyncio.get_running_loop()
        tasks = []
        for index in range(request.n):
            seed = self.seed_of(number, index)
            if request.seed is not None:
                seed = _mixed(request.seed, index)
            one = LLMRequest(
                f"{self.name}.{number}.{index}",
                asked.context,
                config.new(seed=seed),
                on_tokens=None if hear is None else partial(hear, index),
            )
            coroutine = self.engine.agenerate(one)
            tasks.append(loop.create_task(coroutine, context=self.context.copy()))
        self._running.update(tasks)
        try:
            responses = list(await asyncio.gather(*tasks))
        except (DataError, ConfigError) as error:
            raise RequestError(400, str(error)) from None
        except asyncio.CancelledError:
            if self.is_closed:
                raise _over() from None
            raise
        finally:
            for task in tasks:
                task.cancel()
            self._running.difference_update(tasks)
        if self.is_closed:
            raise _over()
        return number, responses

    def _choice(self, index: int, response: LLMResponse, tools: Tools | None) -> Choice:
        plain = response.text
        if plain is None:
            plain = self.tokenizer.decode(response.output_tokens, skip_special_tokens=True)
        if not tools:
            return Choice(index, plain, (), response)
        turn = parse_tool_calls(self.tree.spoken(response), self.tool_format)
        calls: tuple[ToolCall, ...] = tuple(call for call in turn.calls if call.error is None)
        # A call that cannot be read is text: the client sees what the model wrote.
        return Choice(index, turn.content if calls else plain, calls, response)

    def _answer(
        self,
        request: ChatRequest | CompletionRequest,
        head: Head,
        asked: Asked,
        choices: Sequence[Choice],
    ) -> Answer:
        return Answer(
            head=head,
            choices=choices,
            prompt_tokens=len(asked.context),
            tokenizer=self.tokenizer,
            with_ids=request.return_token_ids,
        )


def _over() -> RequestError:
    return RequestError(410, "the episode of this key is over")


def _mixed(seed: int, index: int) -> int:
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _told(message: MessageIn) -> dict[str, Any]:
    """What matters of a client's message when it is compared to an earlier answer."""
    told: dict[str, Any] = {"role": message.role, "content": message.text()}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            told[name] = value
    if message.tool_calls:
        told["calls"] = [
            [call.id, call.function.name, call.function.arguments] for call in message.tool_calls
        ]
    return told


def _told_back(choice: Choice) -> dict[str, Any]:
    message = choice.message()
    return _told(MessageIn.model_validate(message))


def _shown(message: MessageIn) -> Message:
    """A message as chat templates want it: the arguments of calls as objects."""
    role = "system" if message.role == "developer" else message.role
    shown: dict[str, Any] = {"role": role, "content": message.text()}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            shown[name] = value
    if message.tool_calls:
        shown["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _object(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return shown


def _object(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError(
            400, f"tool_calls: arguments are not a JSON object: {text[:80]!r}", param="messages"
        )
    return value
