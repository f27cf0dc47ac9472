"""YAML as configuration files need it. Schemas and key suggestions do not belong here.

Scalars follow the core schema of YAML 1.2: ``1e-5`` is a float, ``010`` is ten, and ``no``, ``on``,
``12:30`` and ``2024-01-01`` are strings. A key that appears twice is an error.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from tandem.errors import ConfigError

_PREFIX = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == f"{_PREFIX}merge" or not isinstance(key_node, yaml.ScalarNode):
                continue
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                line = key_node.start_mark.line + 1
                raise ConfigError(f"line {line}: the key {key!r} appears twice; keep one of them")
            seen.add(key)
        return super().construct_mapping(node, deep)


# The parent's table holds the rules of YAML 1.1.
_Loader.yaml_implicit_resolvers = {}


def _resolve(tag: str, pattern: str, first: str) -> None:
    _Loader.add_implicit_resolver(_PREFIX + tag, re.compile(f"^(?:{pattern})$"), list(first))


_resolve("null", "~|null|Null|NULL", "~nN")
_Loader.add_implicit_resolver(f"{_PREFIX}null", re.compile("^$"), [""])
_resolve("bool", "true|True|TRUE|false|False|FALSE", "tTfF")
_resolve("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789")
_resolve(
    "float",
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    "-+.0123456789",
)
_resolve("merge", "<<", "<")


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    return int(text, base)


_Loader.add_constructor(f"{_PREFIX}int", _integer)


def parse_yaml(text: str) -> Any:
    """The value of one YAML document.

    Raises:
        ConfigError: the text is not YAML, has a tag, or repeats a key; the message is one line.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{where}{error.problem or error.context or error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(" ".join(str(error).split())) from None
