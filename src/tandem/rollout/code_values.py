"""Python values as JSON and back, between a test and the solution that it calls.

Plain data only: what is no such value cannot cross, and nothing is pickled.
"""

from __future__ import annotations

from typing import Any

_PLAIN = (str, bool, type(None))
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def encode_value(value: Any) -> Any:
    """``TypeError`` when ``value`` is not made of Python's own plain types."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int or kind is float:
        # As text: JSON has no NaN, and readers may refuse long integers.
        return {kind.__name__: hex(value) if kind is int else value.hex()}
    if kind is list:
        return [encode_value(item) for item in value]
    if kind.__name__ in _SEQUENCES and kind is _SEQUENCES[kind.__name__]:
        return {kind.__name__: [encode_value(item) for item in value]}
    if kind is dict:
        return {"dict": [[encode_value(k), encode_value(v)] for k, v in value.items()]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    raise TypeError(f"a {kind.__name__} cannot leave the process of the solution")


def decode_value(value: Any) -> Any:
    """``ValueError`` or ``TypeError`` when ``value`` is not what ``encode_value`` makes."""
    if isinstance(value, list):
        return [decode_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, body),) = value.items()
    if kind == "int":
        return int(body, 16)
    if kind == "float":
        return float.fromhex(body)
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode_value(item) for item in body)
    if kind == "dict":
        return {decode_value(k): decode_value(v) for k, v in body}
    if kind == "bytes":
        return bytes.fromhex(body)
    if kind == "complex":
        return complex(float.fromhex(body[0]), float.fromhex(body[1]))
    raise ValueError(f"unknown kind of value {kind!r}")
