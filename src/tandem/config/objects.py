"""Finding a user's Python object by the name written in a configuration.

Only configurations name code; nothing received over a socket or read from a data file comes here.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from tandem.errors import ConfigError

T = TypeVar("T")


def load_object(spec: str, *, field: str = "import path") -> Any:
    """The object named by ``path/to/file.py:name`` or ``package.module:name``.

    A file is executed once per process, whatever the number of names taken from it; relative paths
    start at the working directory. ``field`` is the configuration key that errors speak of.

    Raises:
        ConfigError: malformed, not found, or the module raised while it was imported.
    """
    location, separator, name = spec.rpartition(":")
    if not separator or not location or not name:
        raise ConfigError(
            f"{field}: got {spec!r}, allowed: path/to/file.py:name or package.module:name"
        )
    module = _module_of_file(location, spec, field) if location.endswith(".py") else None
    if module is None:
        module = _imported(location, spec, field)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{field} {spec!r}: {location} has no {name!r}")
        found = getattr(found, part)
    return found


def load_function(
    name: str, known: Mapping[str, Callable[..., T]], *, field: str, also: Sequence[str] = ()
) -> Callable[..., T]:
    """The built-in function called ``name``, or the one that ``load_object`` finds under it.

    ``also`` are names that the caller understands without a function, for the error message.

    Raises:
        ConfigError: there is no such function.
    """
    if name in known:
        return known[name]
    if ":" not in name:
        raise ConfigError(
            f"{field}: got {name!r}, allowed: {', '.join(sorted({*also, *known}))}, "
            "path/to/file.py:function or package.module:function"
        )
    function: Callable[..., T] = load_object(name, field=field)
    if not callable(function):
        raise ConfigError(f"{field}: {name} is a {type(function).__name__}, not a function")
    return function


def _imported(location: str, spec: str, field: str) -> ModuleType:
    try:
        return importlib.import_module(location)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{field} {spec!r}: importing {location!r} failed: {error!r}") from error


def _module_of_file(location: str, spec: str, field: str) -> ModuleType:
    path = Path(location).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"{field} {spec!r}: no file {str(path)!r}")
    name = f"_tandem_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"{field} {spec!r}: running {str(path)!r} failed: {error!r}") from error
    return module
