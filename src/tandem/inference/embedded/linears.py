"""Linear layers with their weights laid out for the processor's matrix kernels.

On a CPU the packed product is up to twice as fast as the plain one for the few rows of a decoding
step, and (in fp32) gives a row the same bits whatever other rows there are, which the plain one
does from 16 rows on only. The parameters stay where they are; ``refresh`` packs them again.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

ROWS_HINT = 64
WIDE_ROWS = 16
"""On processors without matrix units for bf16, products of bf16 weights with at least this many
rows are faster in fp32; with fewer rows reading the weights decides, and bf16 halves that."""
MIN_PLAIN_ROWS = 16
"""From this many rows on, the rows of a plain fp32 product do not depend on each other's number."""
_PROBED_ROWS = (1, 2, 7, 16, 33)

Pack = Callable[[Tensor, int], Tensor]
Apply = Callable[[Tensor, Tensor, Tensor | None, str, list[float], str], Tensor]


class PackedLinears:
    """Replaces the computation of every ``nn.Linear`` of ``model`` by its packed form."""

    def __init__(self, model: nn.Module) -> None:
        layers = [item for item in model.modules() if type(item) is nn.Linear]
        widens = _widens(layers)
        self._forms = [_Packed(layer, widens=widens) for layer in layers]
        for layer, form in zip(layers, self._forms, strict=True):
            layer.forward = form.apply  # type: ignore[method-assign, assignment]

    def refresh(self) -> None:
        """Take over the parameters as they are now."""
        for form in self._forms:
            form.pack()

    @torch.inference_mode()
    def is_row_invariant(self) -> bool:
        """Whether rows alone and among others give the same bits in layers of every shape."""
        forms = {tuple(form.layer.weight.shape): form for form in self._forms}
        return all(_rows_agree(form) for form in forms.values())


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build of torch has the packed product, and it works for ``dtype``."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    layer = nn.Linear(32, 48, bias=True, dtype=dtype)
    rows = torch.ones(3, 32, dtype=dtype)
    with torch.inference_mode():
        try:
            packed = _Packed(layer).apply(rows)
        except RuntimeError:
            return False
        return torch.allclose(packed.float(), layer(rows).float(), rtol=1e-2, atol=1e-2)


def _widens(layers: Sequence[nn.Linear]) -> bool:
    """Whether bf16 layers get a copy in fp32: never on processors that multiply bf16 in tiles, nor
    where the copy would take more than a quarter of the memory."""
    if not layers or layers[0].weight.dtype != torch.bfloat16 or torch.cpu._is_amx_tile_supported():
        return False
    copy = sum(4 * layer.weight.numel() for layer in layers)
    return copy <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


class _Packed:
    """One layer. Compiled code knows it by a number, because its weight has no strides."""

    def __init__(self, layer: nn.Linear, *, widens: bool = False) -> None:
        self.layer = layer
        self._widens = widens
        self._wide: Tensor | None = None
        self._wide_bias: Tensor | None = None
        self.pack()
        self._number = next(_numbers)
        _by_number[self._number] = self

    @torch.inference_mode()
    def pack(self) -> None:
        pack: Pack = torch.ops.mkldnn._reorder_linear_weight
        weight, bias = self.layer.weight.detach(), self.layer.bias
        self._weight = pack(weight, ROWS_HINT)
        if self._widens:
            self._wide = pack(weight.float(), ROWS_HINT)
            self._wide_bias = None if bias is None else bias.detach().float()

    def apply(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            out: Tensor = torch.ops.tandem.packed_linear(x, self._number, self.layer.out_features)
            return out
        apply: Apply = torch.ops.mkldnn._linear_pointwise
        if self._wide is not None and x.numel() >= WIDE_ROWS * x.shape[-1]:
            wide = apply(x.float(), self._wide, self._wide_bias, "none", [], "")
            return wide.to(x.dtype)
        return apply(x, self._weight, self.layer.bias, "none", [], "")


_numbers = itertools.count()
_by_number: weakref.WeakValueDictionary[int, _Packed] = weakref.WeakValueDictionary()
_library = torch.library.Library("tandem", "DEF")
_library.define("packed_linear(Tensor x, int number, int out_features) -> Tensor")


@torch.library.impl(_library, "packed_linear", "CPU")
def _packed_linear(x: Tensor, number: int, out_features: int) -> Tensor:
    return _by_number[number].apply(x)


@torch.library.register_fake("tandem::packed_linear", lib=_library)
def _packed_linear_shape(x: Tensor, number: int, out_features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


def _rows_agree(form: _Packed) -> bool:
    weight = form.layer.weight
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(max(_PROBED_ROWS), weight.shape[1], generator=generator).to(weight.dtype)
    whole = form.apply(rows)
    return all(torch.equal(form.apply(rows[:count]), whole[:count]) for count in _PROBED_ROWS)


def min_rows(model: nn.Module, packed: PackedLinears | None) -> int:
    """Rows that a forward pass must have for its results not to depend on their number.

    Rows in bf16 depend on it in any case, so nothing is gained by padding them.
    """
    dtype = next(model.parameters()).dtype
    if dtype != torch.float32 or (packed is not None and packed.is_row_invariant()):
        return 1
    return MIN_PLAIN_ROWS
