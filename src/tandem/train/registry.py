"""Names of train engines. What an engine can do is declared by its class."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any, ClassVar, TypeVar

import torch

from tandem.errors import ConfigError
from tandem.train.engine import TrainEngine

Engine = TypeVar("Engine", bound=type[TrainEngine])
Key = tuple[str, str, str]

MODEL_TYPES = ("language_model", "value_model", "reward_model")
DEVICES = ("cuda", "npu", "cpu")
ENTRY_POINTS = "tandem.train_engines"

BUILT_IN: dict[Key, str] = {
    (model_type, backend, device): f"tandem.train.{backend}:{prefix}{name}"
    for backend, prefix in (("local", "Local"), ("fsdp", "FSDP"))
    for model_type, name in (
        ("language_model", "TrainEngine"),
        ("value_model", "ValueEngine"),
        ("reward_model", "RewardEngine"),
    )
    for device in ("cpu", "cuda")
}


class EngineRegistry:
    """Train engines by model type, backend and device.

    Third parties register with the decorator, or by an entry point of the group
    ``tandem.train_engines`` whose module registers when it is imported.
    """

    _registered: ClassVar[dict[Key, type[TrainEngine]]] = {}
    _has_loaded_entry_points = False

    @classmethod
    def register(
        cls, model_type: str, backend: str | Sequence[str], device: str | Sequence[str] = "cuda"
    ) -> Callable[[Engine], Engine]:
        """Class decorator; ``backend`` and ``device`` may be lists.

        Raises:
            ConfigError: the key is taken, or the model type or device is unknown.
        """
        backends = [backend] if isinstance(backend, str) else list(backend)
        devices = [device] if isinstance(device, str) else list(device)
        keys = [(model_type, name, kind) for name in backends for kind in devices]

        def decorate(engine: Engine) -> Engine:
            for key in keys:
                cls._check_free(key, engine)
            cls._registered.update(dict.fromkeys(keys, engine))
            return engine

        return decorate

    @classmethod
    def get_engine_cls(
        cls, model_type: str, backend: str, device: str | None = None
    ) -> type[TrainEngine]:
        """The engine class; ``device`` None takes cuda, npu, else cpu, whichever is there.

        Raises:
            ConfigError: no such key; the message lists what exists.
        """
        key = (model_type, backend, detect_device() if device is None else device.split(":")[0])
        if key in BUILT_IN:
            module, _, name = BUILT_IN[key].partition(":")
            found: type[TrainEngine] = getattr(importlib.import_module(module), name)
            return found
        cls._load_entry_points()
        if key not in cls._registered:
            known = sorted({*BUILT_IN, *cls._registered})
            listed = "; ".join(" ".join(item) for item in known)
            raise ConfigError(f"no train engine for {' '.join(key)!r}; there are: {listed}")
        return cls._registered[key]

    @classmethod
    def new(cls, model_type: str, backend: str, *args: Any, **kwargs: Any) -> TrainEngine:
        """Construct an engine; the device is ``kwargs["config"].device``, else detected."""
        config = kwargs.get("config", args[0] if args else None)
        engine_cls = cls.get_engine_cls(model_type, backend, getattr(config, "device", None))
        return engine_cls(*args, **kwargs)

    @classmethod
    def _check_free(cls, key: Key, engine: type[TrainEngine]) -> None:
        for what, value, allowed in (
            ("model type", key[0], MODEL_TYPES),
            ("device", key[2], DEVICES),
        ):
            if value not in allowed:
                raise ConfigError(f"{what}: got {value!r}, allowed: {', '.join(allowed)}")
        if key in BUILT_IN or key in cls._registered:
            owner = BUILT_IN.get(key) or cls._registered[key].__qualname__
            raise ConfigError(
                f"train engine {' '.join(key)!r} is registered already by {owner}; "
                f"register {engine.__qualname__} under another backend name"
            )

    @classmethod
    def _load_entry_points(cls) -> None:
        if not cls._has_loaded_entry_points:
            cls._has_loaded_entry_points = True
            for entry in entry_points(group=ENTRY_POINTS):
                entry.load()


def check_device(device: str | None, field: str = "train.device") -> None:
    """Refuse a CUDA device that is not there; None is detected and always is.

    Raises:
        ConfigError: ``field`` names one.
    """
    kind, _, index = (device or "").partition(":")
    if kind != "cuda":
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise ConfigError(f"{field}: got {device!r}, but there is no CUDA device; allowed: cpu")
    if index.isdigit() and int(index) >= count:
        raise ConfigError(f"{field}: got {device!r}, allowed: cuda:0 to cuda:{count - 1}")


def detect_device() -> str:
    """cuda, npu, else cpu."""
    if torch.cuda.is_available():
        return "cuda"
    npu = getattr(torch, "npu", None)
    return "npu" if npu is not None and npu.is_available() else "cpu"
