"""What makes a saved training state one of this engine: model, adapter, tokenizer, tensors.

Reading and writing the state is in ``state``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tandem.models.loading import tokenizer_digest

if TYPE_CHECKING:
    from tandem.train.engine import TrainEngine

VOLATILE = frozenset({"architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"})
"""Keys of a model's configuration that say how it is run or was stored, not what it computes."""

ADAPTER_KEYS = ("rank", "alpha", "target_modules")


def describe(engine: TrainEngine) -> dict[str, Any]:
    """The identity to be stored with a training state, as plain JSON."""
    return {
        "model_type": engine.model_type,
        "model_config": _model_config(engine),
        "adapter": _adapter(engine),
        "tokenizer_sha256": tokenizer_digest(engine.tokenizer_path or engine.model_path),
        "train_config_sha256": _train_config_digest(engine),
    }


def identity_problems(engine: TrainEngine, saved: Mapping[str, Any]) -> list[str]:
    """Everything in which the engine that wrote ``saved`` was another one than ``engine``."""
    own = engine.identity
    problems = [
        f"{key} is {theirs!r} in the checkpoint, {ours!r} here"
        for section in ("model_type", "model_config", "adapter")
        for key, theirs, ours in _differences(saved[section], own[section], section)
    ]
    if saved["tokenizer_sha256"] != own["tokenizer_sha256"]:
        path = engine.tokenizer_path or engine.model_path
        problems.append(
            f"tokenizer: the one of {path!r} is not the one of the checkpoint (sha256 "
            f"{_short(own['tokenizer_sha256'])}, expected {_short(saved['tokenizer_sha256'])})"
        )
    return problems


def has_same_train_config(engine: TrainEngine, saved: Mapping[str, Any]) -> bool:
    return bool(saved["train_config_sha256"] == engine.identity["train_config_sha256"])


def tensor_problems(own: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    """Missing, unexpected, mis-shaped tensors, and those that are tied on one side only."""
    problems = [f"{name} is missing" for name in sorted(own.keys() - found.keys())]
    problems += [f"{name} is unexpected" for name in sorted(found.keys() - own.keys())]
    problems += [
        f"{name} is {found[name].dtype} {list(found[name].shape)}, expected {own[name].dtype} "
        f"{list(own[name].shape)}"
        for name in sorted(own.keys() & found.keys())
        if own[name].shape != found[name].shape or own[name].dtype != found[name].dtype
    ]
    first: dict[int, str] = {}
    for name in sorted(own.keys() & found.keys()):
        twin = first.setdefault(id(own[name]), name)
        if own[name].numel() and found[name] is not found[twin]:
            problems.append(f"{name} and {twin} are tied in this model but not in the file")
    return problems


def _model_config(engine: TrainEngine) -> Any:
    config = json.loads(json.dumps(engine.model.config.to_dict(), sort_keys=True, default=str))
    return _without_volatile(config)


def _without_volatile(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {
        key: _without_volatile(value)
        for key, value in config.items()
        if key not in VOLATILE and not key.startswith("_")
    }


def _adapter(engine: TrainEngine) -> dict[str, Any] | None:
    if engine.lora is None:
        return None
    config = engine.lora.model_dump(mode="json")
    return {key: config[key] for key in ADAPTER_KEYS}


def _train_config_digest(engine: TrainEngine) -> str:
    parts = [
        engine.config.model_dump(mode="json", exclude={"backend", "device", "parallel"}),
        None if engine.lora is None else engine.lora.model_dump(mode="json"),
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _differences(saved: Any, own: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(saved, dict) and isinstance(own, dict):
        for key in sorted({*saved, *own}):
            yield from _differences(saved.get(key), own.get(key), f"{path}.{key}")
    elif saved != own:
        yield path, saved, own


def _short(digest: str | None) -> str:
    return "none" if digest is None else digest[:12]
