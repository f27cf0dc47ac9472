"""What keys the schema has, and which of them a misspelt one probably meant.

Reading files does not belong here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel

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
    "loss_type": "loss",
    "rpo_alpha": "sft_coef",
    "simpo_gamma": "gamma",
    "center_rewards_coefficient": "center_coef",
}
"""Names of other libraries for our keys, used in suggestions only."""


def section_fields(annotation: Any) -> dict[str, Any] | None:
    """Field name -> annotation of a section (looking through ``| None``); None for a value.

    A mapping of sections by labels of the user's own is a value.
    """
    if get_origin(annotation) is dict:
        return None
    for kind in (annotation, *get_args(annotation)):
        if not isinstance(kind, type):
            continue
        if issubclass(kind, BaseModel):
            return {name: item.annotation for name, item in kind.model_fields.items()}
        if is_dataclass(kind):
            hints = get_type_hints(kind)
            return {item.name: hints[item.name] for item in fields(kind)}
    return None


def section_default(annotation: Any, name: str) -> Any:
    """The section object that the field ``name`` has by default, or None."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            default = kind.model_fields[name].default
            return default if isinstance(default, BaseModel) or is_dataclass(default) else None
    return None


def annotation_at(model: type[BaseModel], path: list[str]) -> Any:
    """Annotation of the key at ``path``, or None where the schema has no such key."""
    current: Any = model
    for name in path:
        fields = section_fields(current) or {}
        if name not in fields:
            return None
        current = fields[name]
    return current


def key_paths(model: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key of the schema as a path, sections before what they hold."""
    for name, annotation in (section_fields(model) or {}).items():
        path = (*prefix, name)
        yield path
        yield from key_paths(annotation, path)


def takes_only_text(annotation: Any) -> bool:
    return {annotation, *get_args(annotation)} - {NoneType} <= {str, str | None}


def takes_boolean(annotation: Any) -> bool:
    """Whether ``true`` is a meaningful value here (free-form mappings and Any included)."""
    kinds = {annotation, *get_args(annotation)}
    return bool(kinds & {bool, Any}) or not kinds & {int, float}


def leaves(value: Any, path: list[str]) -> Iterator[list[str]]:
    """Paths of the values inside a mapping; the mapping itself when it is empty."""
    if isinstance(value, Mapping) and value:
        for name, child in value.items():
            yield from leaves(child, [*path, str(name)])
    else:
        yield path


def suggest(model: type[BaseModel], path: list[str]) -> str:
    """What to type instead of the unknown key: first among its neighbours, then everywhere."""
    paths = list(key_paths(model))
    neighbours = [p for p in paths if list(p[:-1]) == path[:-1]]
    for candidates, cutoff in ((neighbours, 0.6), (paths, 0.75)):
        if found := _closest(candidates, path, cutoff):
            return found
    known = sorted(p[-1] for p in neighbours) or sorted(p[0] for p in paths if len(p) == 1)
    return f"known keys: {', '.join(known)}"


def _closest(paths: list[tuple[str, ...]], path: list[str], cutoff: float) -> str | None:
    ours = {p[-1] for p in paths}
    names = {**{other: own for other, own in SYNONYMS.items() if own in ours}}
    names |= {name: name for name in ours}
    close = difflib.get_close_matches(path[-1], names, n=1, cutoff=cutoff)
    if not close:
        return None
    leaf = names[close[0]]
    wanted = ".".join([*path[:-1], leaf])

    def likeness(candidate: tuple[str, ...]) -> tuple[float, int]:
        ratio = difflib.SequenceMatcher(None, ".".join(candidate), wanted).ratio()
        # Two spellings are told apart by likeness, unrelated ones by being short.
        return (round(ratio, 1), -len(candidate))

    best = max((p for p in paths if p[-1] == leaf), key=likeness)
    note = "" if leaf == close[0] else f" (elsewhere called {close[0]})"
    return f"did you mean {'.'.join(best)!r}?{note}"
