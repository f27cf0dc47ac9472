"""From the bytes of a request to a checked value; whatever is not plainly right is refused.

What belongs here: sizes, deadlines, JSON, errors as OpenAI's clients read them. What the fields
mean is in ``protocol``.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

if TYPE_CHECKING:
    from starlette.requests import Request

Model = TypeVar("Model", bound=BaseModel)

MAX_BODY_BYTES = 8 << 20
BODY_TIMEOUT_S = 30.0


class RequestError(Exception):
    """An answer that is an error; ``param`` is the field that it is about."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }


async def read_body(request: Request) -> bytes:
    """All of a request's body, within ``MAX_BODY_BYTES`` and ``BODY_TIMEOUT_S``."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise _too_large()
    except TimeoutError:
        raise RequestError(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    return bytes(body)


def _too_large() -> RequestError:
    return RequestError(413, f"the body is larger than the {MAX_BODY_BYTES} bytes allowed")


def parse(model: type[Model], body: bytes) -> Model:
    """``body`` as ``model``: UTF-8 JSON without NaN or repeated keys, and no unknown field."""
    try:
        value = json.loads(
            body.decode("utf-8"),
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_once,
        )
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not valid JSON: {error}") from None
    try:
        return model.model_validate(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = ".".join(str(part) for part in first["loc"])
        raise RequestError(400, f"{param}: {first['msg']}", param=param) from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {repeated!r} appears twice")
    return found
