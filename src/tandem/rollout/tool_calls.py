"""Tool calls in a model's text, for the formats that models are trained to write.

What belongs here: from text to calls. Running them is in ``tools``. Nothing is ever evaluated: a
call is JSON, and text that is none is an error that the model can be told.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

ToolFormat = Literal["auto", "hermes", "llama", "mistral", "json"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. ``error`` says why it cannot be run; then name and arguments mean nothing."""

    name: str
    arguments: dict[str, Any]
    id: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """What the model said beside its calls, and the calls in order."""

    content: str
    calls: tuple[ToolCall, ...]


def parse_tool_calls(text: str, format: ToolFormat = "auto") -> ParsedTurn:
    """Find the calls in ``text``.

    ======= ============================================================================
    hermes  ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Hermes, Qwen)
    llama   ``<|python_tag|>{"name": ..., "parameters": {...}}``, several parted by ``;``,
            or such an object alone
    mistral ``[TOOL_CALLS][{...}, ...]`` or ``[TOOL_CALLS]name[ARGS]{...}``
    json    the whole text, bare or in a fence, is a call or a list of calls
    auto    the first of these whose mark is in the text, else json
    ======= ============================================================================

    Ids are a function of the text, nine letters and digits.
    """
    if format == "auto":
        format = next((name for name, mark in _MARKS.items() if mark in text), "json")
    content, found = _PARSERS[format](text)
    calls = [
        ToolCall("", {}, _id(text, index), error=item)
        if isinstance(item, str)
        else _call(item, _id(text, index))
        for index, item in enumerate(found)
    ]
    return ParsedTurn(content.strip(), tuple(calls))


_Found = tuple[str, list[Any]]
"""Text beside the calls, and for each call a JSON value or, as text, what is wrong with it."""

_MARKS: dict[ToolFormat, str] = {
    "hermes": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "llama": "<|python_tag|>",
}
CALL_MARKS = tuple(_MARKS.values())
"""A text with one of these has calls from there on."""
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_NAMED_ARGS = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w*)?\[ARGS\]")
_FENCE = re.compile(r"\A\s*```(?:json)?\s*\n(.*?)\n?```\s*\Z", re.DOTALL)


def _hermes(text: str) -> _Found:
    found = [_one_value(body) for body in _HERMES.findall(text)]
    return _HERMES.sub("", text), found


def _llama(text: str) -> _Found:
    content, mark, body = text.partition(_MARKS["llama"])
    if mark:
        return content, list(_values(body, separator=";"))
    return _json(text, separator=";")


def _mistral(text: str) -> _Found:
    content, _, body = text.partition(_MARKS["mistral"])
    found: list[Any] = []
    for part in body.split(_MARKS["mistral"]):
        if (named := _NAMED_ARGS.match(part)) is not None:
            arguments = _one_value(part[named.end() :])
            is_error = isinstance(arguments, str)
            found.append(arguments if is_error else {"name": named[1], "arguments": arguments})
            continue
        value = _one_value(part)
        found += value if isinstance(value, list) else [value]
    return content, found


def _json(text: str, separator: str = "") -> _Found:
    fenced = _FENCE.match(text)
    body = (fenced[1] if fenced else text).strip()
    if not body.startswith(("{", "[")):
        return text, []
    values: list[Any] = []
    for value in _values(body, separator):
        values += value if isinstance(value, list) else [value]
    if values and all(isinstance(value, dict) and "name" in value for value in values):
        return "", values
    return text, []


_PARSERS: dict[str, Callable[[str], _Found]] = {
    "hermes": _hermes,
    "llama": _llama,
    "mistral": _mistral,
    "json": _json,
}


def _one_value(text: str) -> Any:
    values = list(_values(text, separator=""))
    return values[0] if values else "the call is empty"


def _values(text: str, separator: str) -> Iterator[Any]:
    """JSON values one after another; the first that is none ends them with what is wrong."""
    rest = text.strip()
    while rest:
        try:
            value, end = _DECODER.raw_decode(rest)
        except (ValueError, RecursionError) as error:
            yield f"the call is not JSON: {error}"
            return
        rest = rest[end:].strip()
        if rest and separator and rest.startswith(separator):
            rest = rest[len(separator) :].strip()
        elif rest:
            yield value if separator else f"the call is not one JSON value: {rest!r:.60} follows"
            return
        yield value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _call(value: Any, call_id: str) -> ToolCall:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall("", {}, call_id, "a call is an object with a name and arguments")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _one_value(arguments)
    if not isinstance(arguments, dict):
        return ToolCall(value["name"], {}, call_id, "the arguments of a call are an object")
    return ToolCall(value["name"], arguments, call_id)


def _id(text: str, index: int) -> str:
    return hashlib.sha256(f"{index}/{text}".encode("utf-8", "replace")).hexdigest()[:9]
