"""Python functions as tools: their JSON schemas, checked calls, deadlines, results as text.

What belongs here: everything between a parsed call and the text that answers it. Text formats are
in ``tool_calls``.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

from tandem.config.objects import load_object
from tandem.errors import ConfigError
from tandem.rollout.threads import call_user
from tandem.rollout.tool_calls import ToolCall

FIELD = "rollout.workflow_kwargs.tools"


@dataclass(frozen=True, slots=True)
class Tool:
    """One function with what a model must know about it."""

    name: str
    description: str
    function: Callable[..., Any]
    arguments: type[BaseModel]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """Name, types and texts from the signature, the hints and the docstring.

        The docstring's first paragraph describes the tool; lines ``name: text`` under ``Args:``
        describe the arguments.

        Raises:
            ConfigError: a parameter has no type hint, or one that JSON cannot express.
        """
        name = getattr(function, "__name__", type(function).__name__)
        parameters = inspect.signature(function).parameters
        try:
            hints = get_type_hints(function, include_extras=True)
        except (NameError, TypeError) as error:
            raise ConfigError(f"{FIELD}: {name}: a type hint is not usable: {error}") from error
        description, texts = _docstring(inspect.getdoc(function) or "")
        fields: dict[str, Any] = {}
        for parameter in parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ConfigError(
                    f"{FIELD}: {name}: parameter {parameter.name!r} is {parameter.kind.description}"
                    ", allowed: parameters that can be passed by name"
                )
            if parameter.name not in hints:
                raise ConfigError(
                    f"{FIELD}: {name}: parameter {parameter.name!r} has no type hint; add one"
                )
            default = ... if parameter.default is parameter.empty else parameter.default
            text = texts.get(parameter.name)
            fields[parameter.name] = (hints[parameter.name], Field(default, description=text))
        try:
            model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
            model.model_json_schema()
        except (PydanticUserError, TypeError, NameError) as error:
            raise ConfigError(f"{FIELD}: {name}: no JSON schema: {error}") from error
        return cls(name, description, function, model)

    @property
    def schema(self) -> dict[str, Any]:
        """What chat templates and OpenAI's API call a tool."""
        parameters = _without_titles(self.arguments.model_json_schema())
        parameters.setdefault("properties", {})
        parameters.pop("additionalProperties", None)
        parameters.pop("description", None)
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": parameters,
            },
        }


class ToolRegistry:
    """Tools by name. What goes wrong in a call is text for the model, never an exception.

    A call may take ``timeout_s``; plain functions run in threads, which cannot be killed. Results
    longer than ``max_result_chars`` are cut, and say so.
    """

    def __init__(
        self,
        functions: Iterable[Callable[..., Any]],
        *,
        timeout_s: float = 10.0,
        max_result_chars: int = 4000,
    ) -> None:
        self._tools: dict[str, Tool] = {}
        self._timeout_s = timeout_s
        self._max_result_chars = max_result_chars
        for function in functions:
            tool = Tool.of(function)
            if tool.name in self._tools:
                raise ConfigError(f"{FIELD}: two tools are called {tool.name!r}; rename one")
            self._tools[tool.name] = tool
        if not self._tools:
            raise ConfigError(f"{FIELD}: got no tools, allowed: at least one function")

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self._tools.values()]

    async def run(self, calls: Sequence[ToolCall]) -> list[str]:
        """Run ``calls`` at once; their answers in the same order."""
        return list(await asyncio.gather(*(self._answer(call) for call in calls)))

    async def _answer(self, call: ToolCall) -> str:
        if call.error is not None:
            return f"error: {call.error}"
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: there is no tool {call.name!r}; tools: {', '.join(self._tools)}"
        try:
            checked = tool.arguments.model_validate(call.arguments)
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()
            )
            return f"error: {call.name}: {problems}"
        values = {name: getattr(checked, name) for name in type(checked).model_fields}
        return self._cut(await self._run(tool, values))

    async def _run(self, tool: Tool, values: dict[str, Any]) -> str:
        is_async = inspect.iscoroutinefunction(tool.function)
        function = functools.partial(tool.function, **values)
        try:
            result = await call_user(function, is_async=is_async, timeout_s=self._timeout_s)
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        except TimeoutError:
            return f"error: {tool.name} did not end within {self._timeout_s:g} s"
        except (Exception, SystemExit) as error:
            return f"error: {type(error).__name__}: {error}"

    def _cut(self, text: str) -> str:
        if len(text) <= self._max_result_chars:
            return text
        return f"{text[: self._max_result_chars]}... ({len(text)} characters, cut)"


def load_tools(names: str | Sequence[Any]) -> list[Callable[..., Any]]:
    """Functions named by ``path/file.py:name``; a name may also be that of a list of functions.

    Raises:
        ConfigError: not found, or not a function.
    """
    found: list[Callable[..., Any]] = []
    for name in [names] if isinstance(names, str) else names:
        value = load_object(name, field=FIELD) if isinstance(name, str) else name
        found += value if isinstance(value, list | tuple) else [value]
    for value in found:
        if not callable(value):
            raise ConfigError(f"{FIELD}: got a {type(value).__name__}, allowed: functions")
    return found


_ARGUMENT = re.compile(r"\s+(\w+)\s*(?:\([^)]*\))?:\s*(.+)")


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """The first paragraph, and the text of each argument."""
    description = " ".join(text.split("\n\n", 1)[0].split())
    _, _, arguments = text.partition("Args:\n")
    texts: dict[str, str] = {}
    for line in arguments.split("\n"):
        if line and not line[0].isspace():
            break
        if (match := _ARGUMENT.match(line)) is not None:
            texts[match[1]] = match[2].strip()
    return description, texts


def _without_titles(schema: Any) -> Any:
    """Pydantic names everything a second time; models need not read that."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: _without_titles(value)
        for name, value in schema.items()
        if not (name == "title" and isinstance(value, str))
    }
