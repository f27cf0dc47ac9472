"""From YAML text and dotted overrides to a typed configuration, with errors a person can act on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from tandem.config.keys import (
    annotation_at,
    leaves,
    section_default,
    section_fields,
    suggest,
    takes_boolean,
    takes_only_text,
)
from tandem.config.parse import parse_yaml
from tandem.config.rl import RLConfig
from tandem.config.schema import DPOConfig, EvalRunConfig, RewardModelConfig, Root, SFTConfig
from tandem.config.section import Section
from tandem.errors import ConfigError

KINDS: dict[str, type[Root]] = {
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "reward": RewardModelConfig,
    "rl": RLConfig,
    "eval": EvalRunConfig,
}


def load_config(
    source: str | Path | Mapping[str, Any],
    overrides: Iterable[str] = (),
    *,
    kind: str | None = None,
) -> Any:
    """Read a configuration from a YAML file or a mapping, then apply ``section.key=value``.

    A file may say ``base: other.yaml`` (beside it) and only what differs from that one. Override
    values are read as YAML, except that keys which take text get it verbatim. ``kind`` (``sft``,
    ``dpo``, ``reward``, ``rl`` or ``eval``) must agree with the file's own.

    Raises:
        ConfigError: missing file, bad YAML, unknown keys (each with a suggestion), or bad values;
            every problem found, one a line.
    """
    data = _read(source)
    pairs = [_split(item) for item in overrides]
    model = _kind_of(data, {".".join(path): text for path, text in pairs}, kind)
    for path, text in pairs:
        _apply(data, path, _value(model, path, text))
    return validate(model, data)


def validate(model: type[Section], data: Mapping[str, Any]) -> Any:
    """A section, or a whole configuration, from plain values.

    Raises:
        ConfigError: every unknown key (with a suggestion) and every bad value, one a line.
    """
    problems = list(_misused_booleans(model, data))
    try:
        config = model.model_validate(_completed(model, data))
    except ValidationError as error:
        problems += [line for item in error.errors() for line in _explain(model, item)]
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return config


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """``section.key=value`` items, the values read as YAML, as nested mappings.

    Raises:
        ConfigError: an item of another form, or a value that is not YAML.
    """
    data: dict[str, Any] = {}
    for item in overrides:
        path, text = _split(item)
        _apply(data, path, parse_yaml(text))
    return data


def resolve_recipe(name: str) -> Path:
    """Path of a recipe that ships with Tandem, by its name without ``.yaml``."""
    package = Path(__file__).resolve().parents[1]
    folders = (package / "recipes", package.parents[1] / "recipes")
    for folder in folders:
        if (path := folder / f"{name}.yaml").is_file():
            return path
    known = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    raise ConfigError(
        f"recipe {name!r} is not shipped with this installation; known: {', '.join(known)}"
    )


def to_yaml(config: Root) -> str:
    """The resolved configuration as YAML, every default spelt out."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(source, Mapping):
        return _on_base(_copied(source), Path(), ())
    return _read_file(Path(source), ())


def _read_file(source: Path, readers: tuple[Path, ...]) -> dict[str, Any]:
    """A file on top of its bases; ``readers`` are the files that led here, the first one first."""
    name = f"config file {str(source)!r}"
    try:
        data = parse_yaml(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not YAML: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(
            f"{name}: got {type(data).__name__}, allowed: a mapping of sections, e.g. 'model:'"
        )
    return _on_base(data, source.parent, (*readers, source.resolve()))


def _on_base(data: dict[str, Any], folder: Path, readers: tuple[Path, ...]) -> dict[str, Any]:
    """``data`` without its key ``base``, on top of what the file that it names says."""
    if "base" not in data:
        return data
    base = data.pop("base")
    if not isinstance(base, str):
        raise ConfigError(f"base: got {base!r}, allowed: the path of one YAML file")
    path = folder / base
    if path.resolve() in readers:
        names = " -> ".join(reader.name for reader in (*readers, path.resolve()))
        raise ConfigError(f"base: {names} leads back to itself; leave one of them out")
    return _merged(_read_file(path, readers), data)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Sections key by key; any other value of ``above``, null too, replaces the one below."""
    merged = dict(below)
    for name, value in above.items():
        under = merged.get(name)
        both = isinstance(value, dict) and isinstance(under, dict)
        merged[name] = _merged(under, value) if both else value  # type: ignore[arg-type]
    return merged


def _copied(value: Any) -> Any:
    return {k: _copied(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _split(item: str) -> tuple[list[str], str]:
    key, separator, text = item.partition("=")
    path = key.strip().split(".")
    if not separator or not all(path):
        raise ConfigError(f"override {item!r}: expected section.key=value, e.g. train.lr=1e-5")
    return path, text


def _kind_of(data: Mapping[str, Any], overrides: Mapping[str, str], kind: str | None) -> type[Root]:
    found = overrides.get("kind", data.get("kind", kind))
    if found not in KINDS:
        raise ConfigError(
            f"kind: got {found!r}, allowed: {', '.join(KINDS)}; write e.g. 'kind: rl' into the file"
        )
    if kind is not None and found != kind:
        raise ConfigError(f"kind: the file is for 'tandem {found}', not 'tandem {kind}'")
    return KINDS[found]


def _value(model: type[Root], path: list[str], text: str) -> Any:
    annotation = annotation_at(model, path)
    is_text = annotation is not None and takes_only_text(annotation)
    if is_text and text not in ("null", "~") and text[:1] not in ("'", '"'):
        return text
    try:
        return parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"override {'.'.join(path)}={text}: not YAML: {error}") from None


def _apply(data: dict[str, Any], path: list[str], value: Any) -> None:
    node = data
    for depth, name in enumerate(path[:-1], start=1):
        child = node.get(name)
        if child is None:
            child = node[name] = {}
        if not isinstance(child, dict):
            raise ConfigError(
                f"override {'.'.join(path)}: {'.'.join(path[:depth])} is the value {child!r}, "
                "not a section"
            )
        node = child
    node[path[-1]] = value


def _completed(annotation: Any, data: Mapping[str, Any], default: Any = None) -> dict[str, Any]:
    """``data`` with what it leaves out taken from the default of its section.

    Changing one key of ``eval.generation`` must not undo ``greedy``, which only the default of that
    section sets, not the class.
    """
    fields = section_fields(annotation) or {}
    base = {name: getattr(default, name) for name in fields} if default is not None else {}
    filled: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, Mapping) and section_fields(fields.get(name)) is not None:
            own = base.get(name) if base else section_default(annotation, name)
            value = _completed(fields[name], value, own)
        filled[name] = value
    return {**base, **filled}


def _misused_booleans(annotation: Any, data: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """``steps: true`` must not mean 1, which is what lax validation makes of it."""
    fields = section_fields(annotation) or {}
    for name, value in data.items():
        if name not in fields:
            continue
        path = f"{prefix}{name}"
        if isinstance(value, bool) and not takes_boolean(fields[name]):
            yield f"{path}: got {value!r}, allowed: a number"
        elif isinstance(value, Mapping):
            yield from _misused_booleans(fields[name], value, f"{path}.")


def _explain(model: type[BaseModel], item: Any) -> Iterator[str]:
    loc = _schema_path(model, [str(part) for part in item["loc"]])
    path = ".".join(loc)
    if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        for leaf in leaves(item["input"], loc):
            yield f"unknown key {'.'.join(leaf)!r}: {suggest(model, leaf)}"
        return
    if item["type"] in ("missing", "missing_argument"):
        yield f"{path}: this key is required"
        return
    message = " ".join(item["msg"].removeprefix("Value error, ").split())
    # A section that checks itself names the class it is made of, the file names the section.
    owner, dot, rest = message.partition(".")
    if dot and owner.isidentifier() and owner in _class_names(annotation_at(model, loc)):
        yield f"{path}.{rest}"
    elif loc and not isinstance(item["input"], dict | BaseModel):
        yield f"{path}: got {item['input']!r}: {message}"
    else:
        yield message


def _class_names(annotation: Any) -> set[str]:
    kinds = (annotation, *get_args(annotation))
    return {kind.__name__ for kind in kinds if isinstance(kind, type)}


def _schema_path(model: type[BaseModel], loc: list[str]) -> list[str]:
    """``loc`` without the labels that validation adds for the members of a union."""
    current: Any = model
    path: list[str] = []
    for name in loc:
        fields = section_fields(current)
        if fields is not None and name in fields:
            path.append(name)
            current = fields[name]
        elif fields is not None or name.isidentifier() or name.isdigit():
            path.append(name)
            current = None
    return path
