"""From YAML text and dotted overrides to a typed configuration, with errors a person can act on."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from tandem.config.schema import RLConfig, Root, SFTConfig
from tandem.errors import ConfigError

KINDS: dict[str, type[Root]] = {"sft": SFTConfig, "rl": RLConfig}

SYNONYMS = {
    "learning_rate": "lr",
    "num_generations": "group_size",
    "n": "group_size",
    "beta": "kl_coef",
    "max_completion_length": "max_new_tokens",
    "max_response_length": "max_new_tokens",
    "max_prompt_length": "max_prompt_tokens",
    "clip_grad": "max_grad_norm",
    "max_steps": "steps",
    "model_name_or_path": "path",
    "max_head_offpolicyness": "max_staleness",
}
"""Names of other libraries for our keys, used in suggestions only."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2 numbers (``1e-5`` is a float) and no duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise ConfigError(f"{key_node.start_mark}: the key {key!r} appears twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def load_config(
    source: str | Path | Mapping[str, Any],
    overrides: Iterable[str] = (),
    *,
    kind: str | None = None,
) -> Any:
    """Read a configuration from a YAML file or a mapping, then apply ``section.key=value``.

    Override values are read as YAML. ``kind`` (``sft`` or ``rl``) must agree with the file's own.

    Raises:
        ConfigError: missing file, bad YAML, unknown key (with a suggestion), or a bad value.
    """
    data = _read(source)
    for item in overrides:
        _apply(data, item)
    found = data.get("kind", kind)
    if found not in KINDS:
        raise ConfigError(f"kind: got {found!r}, allowed: {', '.join(KINDS)}")
    if kind is not None and found != kind:
        raise ConfigError(f"kind: the file is for 'tandem {found}', not 'tandem {kind}'")
    model = KINDS[found]
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_explain(model, error)) from None


def resolve_recipe(name: str) -> Path:
    """Path of a recipe that ships with Tandem, by its name without ``.yaml``."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "recipes", package.parents[1] / "recipes"):
        if (path := folder / f"{name}.yaml").is_file():
            return path
    raise ConfigError(f"recipe {name!r} is not shipped with this installation")


def to_yaml(config: Root) -> str:
    """The resolved configuration as YAML, every default spelt out."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(source, Mapping):
        return _copied(source)
    path = Path(source)
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"config file {str(path)!r}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {str(path)!r} is not YAML: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"config file {str(path)!r}: expected a mapping of sections")
    return data


def _copied(value: Any) -> Any:
    return {k: _copied(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _apply(data: dict[str, Any], item: str) -> None:
    key, separator, text = item.partition("=")
    if not separator or not all(key.split(".")):
        raise ConfigError(f"override {item!r}: expected section.key=value, e.g. train.lr=1e-5")
    *parents, leaf = key.split(".")
    node = data
    for name in parents:
        child = node.get(name)
        if child is None:
            child = node[name] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"override {item!r}: {name!r} is a value, not a section")
        node = child
    try:
        node[leaf] = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {item!r}: the value is not YAML: {error}") from None


def _explain(model: type[BaseModel], error: ValidationError) -> str:
    return "; ".join(_explain_one(model, item) for item in error.errors())


def _explain_one(model: type[BaseModel], item: Any) -> str:
    loc = [str(part) for part in item["loc"]]
    path = ".".join(loc) or "config"
    if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = _fields_at(model, loc[:-1])
        hint = _suggest(loc, known) or f"known keys: {', '.join(sorted(known))}"
        return f"unknown key {path!r}; {hint}"
    if item["type"] == "missing":
        return f"{path}: this key is required"
    message = item["msg"].removeprefix("Value error, ")
    return f"{path}: got {item['input']!r}: {message}" if loc and _short(item) else message


def _short(item: Any) -> bool:
    return not isinstance(item["input"], dict | BaseModel)


def _suggest(loc: list[str], known: list[str]) -> str | None:
    candidates = {**SYNONYMS, **{name: name for name in known}}
    reachable = [name for name, ours in candidates.items() if ours in known]
    close = difflib.get_close_matches(loc[-1], reachable, n=1, cutoff=0.6)
    if not close:
        return None
    ours = ".".join([*loc[:-1], candidates[close[0]]])
    note = "" if candidates[close[0]] == close[0] else f" (elsewhere called {close[0]})"
    return f"did you mean {ours!r}{note}?"


def _fields_at(model: type[BaseModel], loc: list[str]) -> list[str]:
    """Field names of the section reached by ``loc``, looking through optional types."""
    current: Any = model
    for name in loc:
        options = getattr(current, "model_fields", {})
        if name not in options:
            return []
        annotation = options[name].annotation
        kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
        current = next((kind for kind in kinds if hasattr(kind, "__annotations__")), None)
    return list(
        getattr(current, "model_fields", None) or getattr(current, "__dataclass_fields__", {})
    )
