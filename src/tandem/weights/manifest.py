"""What one published version consists of and where it lies. Moving bytes belongs to transports."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast

import torch

from tandem.errors import ConfigError, WeightSyncError
from tandem.types import ParamSpec

if TYPE_CHECKING:
    from tandem.weights.transports.inprocess import Buffer

DTYPES: Mapping[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called ``name``.

    Raises:
        ConfigError: weights of that dtype cannot travel.
    """
    if name not in DTYPES:
        raise ConfigError(f"dtype: got {name!r}, allowed: {', '.join(DTYPES)}")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a published version; ``offset`` counts bytes from the start of the data."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int
    sha256: str = ""

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class Manifest:
    """Every tensor of one version, in the order of the sender's stream."""

    version: int
    incarnation: str
    tensors: tuple[TensorEntry, ...]

    @property
    def size_bytes(self) -> int:
        return max((entry.end for entry in self.tensors), default=0)

    def digest(self) -> str:
        """One sha256 of all names, shapes, dtypes and contents, whatever the version is called."""
        content = [[e.name, e.shape, e.dtype, e.sha256] for e in self.tensors]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | str) -> Manifest:
        """The inverse of ``to_json``; also takes its text.

        Raises:
            WeightSyncError: ``data`` is not a manifest.
        """
        try:
            record = cast("Mapping[str, Any]", json.loads(data) if isinstance(data, str) else data)
            entries = tuple(
                TensorEntry(**{**entry, "shape": tuple(entry["shape"])})
                for entry in record["tensors"]
            )
            return cls(int(record["version"]), str(record["incarnation"]), entries)
        except (KeyError, TypeError, ValueError) as error:
            raise WeightSyncError(
                f"manifest: received something else than a weight manifest ({error!r}); "
                "publish the version again"
            ) from error


class FileLocation(TypedDict):
    """A file of this host, on a disk or in shared memory; the data begins at byte ``data_start``.
    JSON-able."""

    kind: Literal["file", "shared_memory"]
    path: str
    data_start: int


@dataclass(frozen=True, slots=True)
class MemoryLocation:
    """A buffer of this process, valid while it still holds ``generation``."""

    buffer: Buffer
    generation: int


Location = FileLocation | MemoryLocation


@dataclass(frozen=True, slots=True)
class Published:
    """A finished version: what it holds and where to read it (see ``open_published``)."""

    manifest: Manifest
    location: Location

    @property
    def is_in_memory(self) -> bool:
        """Whether a reader may compute with the opened tensors for long: they lie in memory, while
        those of a file on a disk are read again whenever memory gets short."""
        location = self.location
        return isinstance(location, MemoryLocation) or location["kind"] == "shared_memory"

    def to_json(self) -> dict[str, Any]:
        """For another process of this host.

        Raises:
            WeightSyncError: the version lies in the memory of this process.
        """
        if isinstance(self.location, MemoryLocation):
            raise WeightSyncError(
                "transport: 'inprocess' cannot cross processes, allowed: shared_memory, disk; set "
                "inference.transport"
            )
        return {"manifest": self.manifest.to_json(), "location": dict(self.location)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Published:
        return cls(Manifest.from_json(data["manifest"]), cast("FileLocation", data["location"]))


def check_manifest(manifest: Manifest, expected: Sequence[ParamSpec]) -> None:
    """Compare a manifest with what the receiver holds, before anything is loaded.

    Raises:
        WeightSyncError: names every missing, unexpected, repeated, mis-shaped and wrongly typed
            tensor at once.
    """
    problems = compare_specs(
        {spec.name: (tuple(spec.shape), spec.dtype) for spec in expected},
        {entry.name: (entry.shape, entry.dtype) for entry in manifest.tensors},
    )
    problems += [f"repeated: {name}" for name in repeated(e.name for e in manifest.tensors)]
    if problems:
        raise WeightSyncError(
            f"weight version {manifest.version} does not fit the receiver: {'; '.join(problems)}. "
            "Both ends must hold the same model; nothing was loaded, the old version serves on"
        )


def compare_specs(
    expected: Mapping[str, tuple[tuple[int, ...], str]],
    received: Mapping[str, tuple[tuple[int, ...], str]],
) -> list[str]:
    """Every difference between two sets of (shape, dtype) by name, in words."""
    problems = [f"missing: {name}" for name in expected if name not in received]
    problems += [f"unexpected: {name}" for name in received if name not in expected]
    for name, (shape, dtype) in received.items():
        if name not in expected:
            continue
        expected_shape, expected_dtype = expected[name]
        if shape != expected_shape:
            problems.append(f"shape of {name}: got {list(shape)}, allowed: {list(expected_shape)}")
        if dtype != expected_dtype:
            problems.append(f"dtype of {name}: got {dtype}, allowed: {expected_dtype}")
    return problems


def repeated(names: Any) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]
