"""Through a directory that both ends see: one safetensors file a version, ``meta.path/v{n}``."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from tandem.errors import ConfigError, WeightSyncError
from tandem.types import ParamSpec, WeightUpdateMeta
from tandem.weights.bucket import ALIGNMENT, Plan, plan_bucket
from tandem.weights.manifest import FileLocation, Published
from tandem.weights.transports.mapped import fill_file

DATA_NAME = "model.safetensors"
MANIFEST_NAME = "manifest.json"
_PARTIAL = ".partial-"
_KEPT_VERSIONS = 2
_SAFETENSORS_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


class DiskSender:
    """Writes every version to a fresh directory and keeps the newest two that it wrote."""

    def __init__(self) -> None:
        self._written: list[Path] = []

    def write(
        self,
        meta: WeightUpdateMeta,
        specs: Sequence[ParamSpec],
        tensors: Iterable[tuple[str, Tensor]],
    ) -> Published:
        if meta.path is None:
            raise ConfigError("WeightUpdateMeta.path: got None, allowed: a directory (type='disk')")
        plan = plan_bucket(meta, specs, packed=True)
        target = Path(meta.path).absolute() / f"v{meta.version}"
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(prefix=f"{target.name}{_PARTIAL}", dir=target.parent))
            try:
                published = _write_version(partial, target, plan, tensors)
                _put_in_place(partial, target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        except OSError as error:
            raise WeightSyncError(
                f"disk: cannot write {plan.size_bytes} bytes to {target}: {error}; free space "
                "there or point WeightUpdateMeta.path elsewhere"
            ) from error
        self._written = [path for path in self._written if path != target] + [target]
        while len(self._written) > _KEPT_VERSIONS:
            shutil.rmtree(self._written.pop(0), ignore_errors=True)
        return published

    def release(self) -> None:
        """Keep the newest version on disk: the directory is the user's."""
        for path in self._written[:-1]:
            shutil.rmtree(path, ignore_errors=True)
        self._written.clear()


def _write_version(
    directory: Path, target: Path, plan: Plan, tensors: Iterable[tuple[str, Tensor]]
) -> Published:
    header = _safetensors_header(plan)
    file = os.open(directory / DATA_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        manifest = fill_file(file, plan, tensors, header=header)
    finally:
        os.close(file)
    location = FileLocation(kind="file", path=str(target / DATA_NAME), data_start=len(header))
    published = Published(manifest, location)
    (directory / MANIFEST_NAME).write_text(json.dumps(published.to_json()), encoding="utf-8")
    return published


def _safetensors_header(plan: Plan) -> bytes:
    """Length and JSON of the safetensors format, padded so that the data is aligned."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for entry in plan.entries:
        header[entry.name] = {
            "dtype": _SAFETENSORS_DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [entry.offset, entry.end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _put_in_place(partial: Path, target: Path) -> None:
    """Rename; a directory of the same number, of an earlier start of the run, makes way."""
    partial.chmod(0o755)
    if target.exists():
        if not (target / MANIFEST_NAME).is_file():
            raise WeightSyncError(
                f"WeightUpdateMeta.path: {target} exists and is not a published version; use a "
                "directory of its own"
            )
        shutil.rmtree(target)
    partial.rename(target)
