"""The weights of a core as a whole: those that serve, and others that are made ready beside them.

Who makes them ready, and when, is decided in ``filler.py``. Waiting for published weights belongs
to ``inference/updates.py``, transports and manifests to ``tandem.weights``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.inference.embedded.linears import Layout, PackedLinears
from tandem.types import ParamSpec, WeightVersion
from tandem.weights import Manifest, Published, check_manifest, open_published

CONVERSIONS = frozenset({("float32", "bfloat16")})
"""(published, served) dtypes that may differ; everything else must be equal."""
ALIGNMENT = 64
"""Bytes. Products of weights at other addresses are slower and can have other bits."""


@dataclass(slots=True)
class WeightSet:
    """Every parameter by its name on disk, and the layouts of the packed layers, if any.

    Parameters may lie in published memory, which its sender leaves alone until ``release``.
    """

    version: WeightVersion
    tensors: dict[str, Tensor]
    layouts: list[Layout]
    own_bytes: int
    """Memory of this set alone, which is also what was copied to make it."""
    published_bytes: int = 0
    """Published memory that is used where it lies."""
    lease: ExitStack = field(default_factory=ExitStack)

    def release(self) -> None:
        """Free everything; nothing may compute with this set any more."""
        self.tensors.clear()
        self.layouts.clear()
        self.lease.close()


class ModelWeights:
    """The weights that ``model`` computes with. ``exchange`` swaps them between two passes; the
    other methods may be called meanwhile, from any thread."""

    def __init__(
        self, model: PreTrainedModel, packed: PackedLinears | None, version: WeightVersion
    ) -> None:
        self._packed = packed
        self._device = model.device
        self.parameters: Mapping[str, torch.nn.Parameter] = dict(model.named_parameters())
        """The live ones, tied ones once."""
        self._names = {id(item): name for name, item in self.parameters.items()}
        self.specs = [
            ParamSpec(name, tuple(item.shape), str(item.dtype).removeprefix("torch."))
            for name, item in self.parameters.items()
        ]
        tensors = {name: item.data for name, item in self.parameters.items()}
        layouts = packed.layouts if packed is not None else []
        size = sum(item.nbytes for item in tensors.values())
        self._serving = WeightSet(version, tensors, layouts, size + _size_bytes(layouts))

    def fill(self, published: Published, heed: Callable[[], None]) -> WeightSet:
        """Verify every published tensor and make a set of them, which does not serve yet.

        Raises:
            WeightSyncError: a tensor is missing, unexpected, mis-shaped or damaged.
        """
        manifest = published.manifest
        check_manifest(manifest, _with_conversions(self.specs, manifest))
        with ExitStack() as lease, torch.no_grad():
            opened = lease.enter_context(open_published(published, heed=heed))
            found = WeightSet(WeightVersion(manifest.incarnation, manifest.version), {}, [], 0)
            for name, parameter in self.parameters.items():
                heed()
                tensor = opened[name]
                if published.is_in_memory and _fits(tensor, parameter):
                    found.tensors[name] = tensor
                    found.published_bytes += tensor.nbytes
                else:
                    made = torch.empty_like(parameter).copy_(tensor)
                    found.tensors[name] = made
                    found.own_bytes += made.nbytes
            if self._packed is not None:
                found.layouts = self._packed.lay_out(
                    lambda parameter: found.tensors[self._names[id(parameter)]], heed
                )
                found.own_bytes += _size_bytes(found.layouts)
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            if found.published_bytes:
                found.lease = lease.pop_all()
        return found

    def exchange(self, new: WeightSet) -> WeightSet:
        """Compute with ``new`` from here on; returns what served before, to be released."""
        for name, parameter in self.parameters.items():
            parameter.data = new.tensors[name]
        if self._packed is not None:
            self._packed.use(new.layouts)
        old, self._serving = self._serving, new
        return old

    def release(self) -> None:
        """Give the memory back at once; the model cannot be used any more."""
        for parameter in self.parameters.values():
            parameter.data = parameter.data.new_empty(0)
        self._serving.release()

    @property
    def size_bytes(self) -> int:
        """Memory of the set that serves, without the published memory it uses."""
        return self._serving.own_bytes

    @property
    def published_bytes(self) -> int:
        """Published memory that the set that serves uses where it lies."""
        return self._serving.published_bytes


def _fits(tensor: Tensor, parameter: Tensor) -> bool:
    """Whether a published tensor can be the parameter as it is."""
    is_same = tensor.dtype == parameter.dtype and tensor.device == parameter.device
    return is_same and tensor.data_ptr() % ALIGNMENT == 0


def _size_bytes(layouts: list[Layout]) -> int:
    return sum(item.size_bytes for item in layouts)


def _with_conversions(specs: list[ParamSpec], manifest: Manifest) -> list[ParamSpec]:
    sent = {entry.name: entry.dtype for entry in manifest.tensors}
    return [
        ParamSpec(spec.name, spec.shape, sent[spec.name])
        if (sent.get(spec.name), spec.dtype) in CONVERSIONS
        else spec
        for spec in specs
    ]
