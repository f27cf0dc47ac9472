"""What crosses the pipes between a ``ChildBackend`` and its child: length-prefixed JSON frames.

Nothing but data crosses: no pickled objects, no names of code.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, BinaryIO, cast

from tandem import errors
from tandem.errors import EngineError, TandemError
from tandem.types import GenerationConfig, LLMRequest, LLMResponse, OnTokens

Frame = dict[str, Any]
_HEADER = struct.Struct(">Q")
_DEFAULTS = GenerationConfig()
_NEUTRAL = {item.name: getattr(_DEFAULTS, item.name) for item in fields(_DEFAULTS)}
_EXTRAS = ("raw_logprobs", "top_logprobs", "prompt_logprobs")
_ERRORS = {
    name: item
    for name, item in vars(errors).items()
    if isinstance(item, type) and issubclass(item, TandemError)
}


def write_frame(stream: BinaryIO, frame: Mapping[str, Any]) -> None:
    """Write and flush one frame; callers serialise access to ``stream``."""
    body = json.dumps(frame, separators=(",", ":")).encode()
    stream.write(_HEADER.pack(len(body)) + body)
    stream.flush()


def read_frame(stream: BinaryIO) -> Frame | None:
    """The next frame, or ``None`` when the other end is gone."""
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    (size,) = _HEADER.unpack(header)
    body = stream.read(size)
    return cast("Frame", json.loads(body)) if len(body) == size else None


def encode_request(request: LLMRequest) -> Frame:
    """Without ``metadata``, which no backend reads; of ``on_tokens`` only that there is one."""
    config = request.gconfig
    options = {k: v for k in _NEUTRAL if (v := getattr(config, k)) != _NEUTRAL[k]}
    if "logit_bias" in options:
        options["logit_bias"] = dict(options["logit_bias"])
    frame: Frame = {"rid": request.rid, "ids": request.input_ids, "options": options}
    if request.on_tokens is not None:
        frame["streams"] = True
    return frame | {name: getattr(request, name) for name in _EXTRAS if getattr(request, name)}


def decode_request(frame: Frame, on_tokens: OnTokens | None = None) -> LLMRequest:
    """``on_tokens`` is taken by a request that streams."""
    options = dict(frame["options"])
    if "logit_bias" in options:
        options["logit_bias"] = {int(k): v for k, v in options["logit_bias"].items()}
    extras = {name: frame[name] for name in _EXTRAS if name in frame}
    if "streams" in frame:
        extras["on_tokens"] = on_tokens
    return LLMRequest(frame["rid"], tuple(frame["ids"]), GenerationConfig(**options), **extras)


def encode_response(response: LLMResponse) -> Frame:
    """Without ``input_tokens``, which the other end has."""
    skipped = "input_tokens"
    return {f.name: getattr(response, f.name) for f in fields(response) if f.name != skipped}


def decode_response(frame: Frame, request: LLMRequest) -> LLMResponse:
    top = frame.get("top_logprobs")
    if top is not None:
        frame = {**frame, "top_logprobs": [[(i, p) for i, p in token] for token in top]}
    return LLMResponse(input_tokens=list(request.input_ids), **frame)


def encode_error(error: BaseException) -> Frame:
    """Name and message; an error that is not one of ours arrives as ``EngineError``."""
    name = type(error).__name__
    if isinstance(error, TandemError) and name in _ERRORS:
        return {"error": name, "message": str(error)}
    return {"error": "EngineError", "message": f"{name}: {error}"}


def decode_error(frame: Frame) -> TandemError:
    return _ERRORS.get(frame["error"], EngineError)(frame["message"])
