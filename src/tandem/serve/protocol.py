"""Requests of OpenAI's API as far as they are honoured. A field that is not here is refused.

What belongs here: names, types and ranges of fields, and the options that they set. What is done
with them is in ``session``, how answers are spelt in ``answers``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tandem.serve.strict import RequestError
from tandem.types import GenerationConfig

Count = Annotated[int, Field(ge=1, le=1 << 20)]
Text = Annotated[str, Field(max_length=4 << 20)]
Stop = Annotated[str, Field(min_length=1, max_length=200)]
Token = Annotated[int, Field(ge=0, lt=1 << 31)]

SAMPLING = ("temperature", "top_p", "frequency_penalty", "presence_penalty")
"""Options that change the distribution, which an episode has from its configuration."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class TextPart(_Part):
    type: Literal["text"]
    text: Text


class FunctionCall(_Part):
    name: Annotated[str, Field(min_length=1, max_length=200)]
    arguments: Text


class CallIn(_Part):
    id: Annotated[str, Field(max_length=200)]
    type: Literal["function"] = "function"
    function: FunctionCall


class MessageIn(_Part):
    """The fields that are always null are those that clients send back with our own answers."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart] | None = None
    name: Annotated[str, Field(max_length=200)] | None = None
    tool_calls: list[CallIn] | None = None
    tool_call_id: Annotated[str, Field(max_length=200)] | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None

    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class FunctionIn(_Part):
    name: Annotated[str, Field(min_length=1, max_length=200)]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolIn(_Part):
    type: Literal["function"]
    function: FunctionIn


class StreamOptions(_Part):
    include_usage: bool = False


class ResponseFormat(_Part):
    type: Literal["text"]


class _Request(_Part):
    model: Annotated[str, Field(max_length=500)]
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    n: Annotated[int, Field(ge=1, le=64)] = 1
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=500)] | None = None
    return_token_ids: bool = Field(
        False, description="ids, log-probabilities and versions beside each choice"
    )

    @property
    def limit(self) -> int | None:
        raise NotImplementedError

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the number of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(_Request):
    messages: Annotated[list[MessageIn], Field(min_length=1, max_length=10_000)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    tools: Annotated[list[ToolIn], Field(max_length=512)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: ResponseFormat | None = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def schemas(self) -> list[dict[str, Any]] | None:
        """The tools as chat templates want them."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.model_dump(exclude_none=True) for tool in self.tools]


class CompletionRequest(_Request):
    prompt: Text | Annotated[list[Token], Field(min_length=1, max_length=1 << 20)]
    max_tokens: Count | None = None
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    echo: Literal[False] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens


Sampling = Literal["fixed", "replaced", "free"]
"""What a client may say of the sampling options: the configured values; anything, which the
configured values replace; or anything, which is done (nothing of it can be trained on)."""


def generation_of(
    request: ChatRequest | CompletionRequest, configured: GenerationConfig, sampling: Sampling
) -> GenerationConfig:
    """The options of a request over those ``configured``."""
    wishes = {name: getattr(request, name) for name in SAMPLING}
    if sampling == "free":
        configured = configured.new(**{k: v for k, v in wishes.items() if v is not None})
    for name, wanted in wishes.items():
        ours = getattr(configured, name)
        if wanted is not None and wanted != ours and sampling == "fixed":
            raise RequestError(
                400,
                f"{name}: got {wanted}, this episode samples with {ours}; leave it out, or set "
                "rollout.workflow_kwargs.override_sampling to have it replaced",
                param=name,
            )
    stop = request.stop or ()
    limit = request.limit or configured.max_new_tokens
    return configured.new(
        n_samples=1,
        max_new_tokens=min(limit, configured.max_new_tokens),
        stop=(*configured.stop, *((stop,) if isinstance(stop, str) else stop)),
    )
