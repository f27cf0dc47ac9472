"""Objects that a configuration names by Python path. Only configuration may name them, never a
request or a model's output."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tandem.errors import ConfigError


def import_object(name: str, *, field: str) -> Any:
    """``path/to/file.py:attribute`` or ``package.module:attribute``.

    Raises:
        ConfigError: naming ``field``, what was asked for and what went wrong.
    """
    location, colon, attribute = name.rpartition(":")
    if not colon or not location or not attribute:
        raise ConfigError(
            f"{field}: got {name!r}, allowed: path/to/file.py:name or package.module:name"
        )
    module = _import_file(location, field) if location.endswith(".py") else _import(location, field)
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(f"{field}: {location} has no attribute {attribute!r}") from None


def _import(location: str, field: str) -> ModuleType:
    try:
        return importlib.import_module(location)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{field}: cannot import {location!r}: {error}") from error


def _import_file(location: str, field: str) -> ModuleType:
    path = Path(location).resolve()
    if not path.is_file():
        raise ConfigError(f"{field}: no such file: {path}")
    module_name = f"tandem_user_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module
