"""State as typed JSON: what is read back equals what was written, in value and in type.

Floats are exact (shortest text that reads back equal). What JSON lacks is tagged: tuples, bytes,
mappings whose keys are not plain strings, and, only on request, NaN and infinities. Tensors belong
to ``tensors.py``.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from tandem.checkpoint.files import write_other
from tandem.errors import CheckpointError
from tandem.files import write_durably


def write_state(path: Path | str, obj: Any, *, allow_nonfinite: bool = False) -> None:
    """Write ``obj`` durably and at once: a reader sees the old file or the whole new one.

    Inside a staging with a background writer the file appears when the block has ended.

    Raises:
        CheckpointError: ``obj`` holds a type that would not come back as itself, or NaN or an
            infinity without ``allow_nonfinite``.
        OSError: the file cannot be written.
    """
    path = Path(path)
    encoded = encode(obj, allow_nonfinite=allow_nonfinite)
    write_other(path, partial(_write, path, encoded))


def _write(path: Path, encoded: Any) -> None:
    write_durably(path, json.dumps(encoded, allow_nan=False, indent=1))


def read_state(path: Path | str) -> Any:
    """The inverse of ``write_state``.

    Raises:
        CheckpointError: the file is missing or is not typed JSON.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        return decode(json.loads(text, parse_constant=_refuse_constant))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{path}: cannot be read as state ({type(error).__name__}: {error}); resume from "
            "another checkpoint"
        ) from error


def encode(obj: Any, *, allow_nonfinite: bool = False, where: str = "state") -> Any:
    """``obj`` as plain JSON values; ``where`` names it in errors."""
    kind = type(obj)
    if kind in (int, str, bool) or obj is None:
        return obj
    if kind is float:
        if math.isfinite(obj):
            return obj
        if allow_nonfinite:
            return {"$float": repr(obj)}
        raise CheckpointError(
            f"{where}: got {obj!r}, allowed: finite numbers; write it with allow_nonfinite=True if "
            "it is meant"
        )
    if kind is bytes:
        return {"$bytes": base64.b64encode(obj).decode("ascii")}
    if kind in (list, tuple):
        items = [
            encode(item, allow_nonfinite=allow_nonfinite, where=f"{where}[{index}]")
            for index, item in enumerate(obj)
        ]
        return items if kind is list else {"$tuple": items}
    if kind is dict:
        return _encode_dict(obj, allow_nonfinite, where)
    raise CheckpointError(
        f"{where}: got a {kind.__module__}.{kind.__qualname__}, allowed: int, float, str, bool, "
        "None, bytes, list, tuple, dict; convert it, or put tensors into write_tensors"
    )


def _encode_dict(obj: dict[Any, Any], allow_nonfinite: bool, where: str) -> dict[str, Any]:
    values = {
        key: encode(value, allow_nonfinite=allow_nonfinite, where=f"{where}[{key!r}]")
        for key, value in obj.items()
    }
    if all(type(key) is str and not key.startswith("$") for key in obj):
        return values
    keys = [encode(key, where=f"a key of {where}") for key in obj]
    return {"$dict": [[key, value] for key, value in zip(keys, values.values(), strict=True)]}


def decode(value: Any) -> Any:
    """The inverse of ``encode``.

    Raises:
        ValueError: an unknown tag or a tag with the wrong content.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    tags = [key for key in value if key.startswith("$")]
    if not tags:
        return {key: decode(item) for key, item in value.items()}
    if len(value) != 1:
        raise ValueError(f"tag {tags[0]} beside other keys")
    return _decode_tag(tags[0], value[tags[0]])


def _decode_tag(tag: str, content: Any) -> Any:
    if tag == "$tuple" and isinstance(content, list):
        return tuple(decode(item) for item in content)
    if tag == "$dict" and isinstance(content, list):
        return {decode(key): decode(item) for key, item in content}
    if tag == "$float" and content in ("nan", "inf", "-inf"):
        return float(content)
    if tag == "$bytes" and isinstance(content, str):
        try:
            return base64.b64decode(content, validate=True)
        except binascii.Error as error:
            raise ValueError(f"$bytes: {error}") from error
    raise ValueError(f"unknown tag {tag}")


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"bare {text}")
