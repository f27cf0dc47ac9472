"""The one layout of every transport: all tensors of a version in one contiguous run of bytes.

Here are the plan (offsets), filling (with cast and digests) and zero-copy views. Where the bytes
lie, a buffer or a mapped file, is the transport's choice.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tandem.errors import ConfigError, WeightSyncError
from tandem.types import ParamSpec, WeightUpdateMeta
from tandem.weights.manifest import Manifest, TensorEntry, dtype_name, repeated, torch_dtype

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector load."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Offsets of one update, before any tensor is known. ``sources`` are the stream's dtypes."""

    version: int
    incarnation: str
    entries: tuple[TensorEntry, ...]
    sources: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        return max((entry.end for entry in self.entries), default=0)


def plan_bucket(meta: WeightUpdateMeta, specs: Sequence[ParamSpec], *, packed: bool) -> Plan:
    """Assign offsets: aligned to ``ALIGNMENT``, or ``packed`` without holes as safetensors asks.

    Packed tensors are laid out by falling element size, which aligns each to its own elements.

    Raises:
        WeightSyncError: a name occurs twice.
    """
    names = repeated(spec.name for spec in specs)
    if names:
        raise WeightSyncError(
            f"specs: repeated names {', '.join(names)}; export each tensor once, tied ones too"
        )
    entries = [_entry(spec, meta.dtype) for spec in specs]
    order = sorted(range(len(entries)), key=lambda i: -_itemsize(entries[i])) if packed else None
    offset = 0
    for index in order if order is not None else range(len(entries)):
        entries[index] = replace(entries[index], offset=offset)
        end = entries[index].end
        offset = end if packed else -(-end // ALIGNMENT) * ALIGNMENT
    return Plan(meta.version, meta.incarnation, tuple(entries), tuple(spec.dtype for spec in specs))


def _entry(spec: ParamSpec, travel_dtype: str | None) -> TensorEntry:
    dtype = torch_dtype(spec.dtype)
    if travel_dtype is not None and dtype.is_floating_point:
        dtype = torch_dtype(travel_dtype)
        if not dtype.is_floating_point:
            raise ConfigError(
                f"WeightUpdateMeta.dtype: got {travel_dtype!r}, allowed: a floating-point dtype"
            )
    shape = tuple(spec.shape)
    return TensorEntry(
        spec.name, shape, dtype_name(dtype), offset=0, nbytes=math.prod(shape) * dtype.itemsize
    )


def _itemsize(entry: TensorEntry) -> int:
    return torch_dtype(entry.dtype).itemsize


def fill_bucket(data: Tensor, plan: Plan, tensors: Iterable[tuple[str, Tensor]]) -> Manifest:
    """Copy the stream into ``data`` (uint8, at least ``plan.size_bytes``), casting on the way.

    Raises:
        WeightSyncError: the stream differs from the specs in number, order, name, shape or dtype.
    """
    entries: list[TensorEntry] = []
    for name, tensor in tensors:
        index = len(entries)
        if index == len(plan.entries):
            raise WeightSyncError(f"stream: got {name} after the last of {index} announced tensors")
        entry = plan.entries[index]
        _check_streamed(name, tensor, entry, plan.sources[index])
        with torch.no_grad():
            view_entry(data, entry).copy_(tensor.detach())
        entries.append(replace(entry, sha256=digest(data, entry)))
    if len(entries) < len(plan.entries):
        missing = ", ".join(entry.name for entry in plan.entries[len(entries) :])
        raise WeightSyncError(f"stream: ended before {missing}; export every announced tensor")
    return Manifest(plan.version, plan.incarnation, tuple(entries))


def _check_streamed(name: str, tensor: Tensor, entry: TensorEntry, dtype: str) -> None:
    received = (name, tuple(tensor.shape), dtype_name(tensor.dtype))
    announced = (entry.name, entry.shape, dtype)
    if received != announced:
        raise WeightSyncError(
            f"stream: got {received}, announced: {announced}; get_param_specs() and "
            "get_per_tensor_param() must agree"
        )


def digest(data: Tensor, entry: TensorEntry) -> str:
    """sha256 over the raw bytes of one tensor (about 1.2 GB/s on one core with SHA extensions)."""
    return hashlib.sha256(data[entry.offset : entry.end].numpy().data).hexdigest()


def view_entry(data: Tensor, entry: TensorEntry) -> Tensor:
    """The tensor inside the bucket, sharing its memory."""
    raw = data[entry.offset : entry.end]
    return raw.view(torch_dtype(entry.dtype)).view(entry.shape)


Heed = Callable[[], None]
"""Called between two tensors; raises to give up."""


def go_on() -> None:
    """The ``Heed`` that never gives up."""


def verified_views(data: Tensor, manifest: Manifest, heed: Heed) -> dict[str, Tensor]:
    """Zero-copy views of every tensor, after checking each digest.

    Raises:
        WeightSyncError: names the tensors whose bytes are not those that were published.
    """
    if data.numel() < manifest.size_bytes:
        raise WeightSyncError(
            f"weight version {manifest.version}: got {data.numel()} bytes, published: "
            f"{manifest.size_bytes}; publish the version again"
        )
    damaged = []
    for entry in manifest.tensors:
        heed()
        if digest(data, entry) != entry.sha256:
            damaged.append(entry.name)
    if damaged:
        raise WeightSyncError(
            f"weight version {manifest.version}: sha256 differs for {', '.join(damaged)}; the "
            "bytes changed on the way, publish the version again"
        )
    return {entry.name: view_entry(data, entry) for entry in manifest.tensors}
