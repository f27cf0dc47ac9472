"""Linear layers with their weights laid out for the processor's matrix kernels.

On a CPU the packed product is up to twice as fast as the plain one for the few rows of a decoding
step, and (in fp32) gives a row the same bits whatever other rows there are, which the plain one
does from 16 rows on only. Layers that read the same input are one product. The parameters stay
where they are; other weights are laid out beside those in use and exchanged for them as a whole.
A processor that cannot multiply bf16 has only an fp32 copy laid out; the fewest rows, whose time is
that of reading the weights, are multiplied with the parameters themselves.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tandem.models.processor import product_dtype

ROWS_HINT = 64
WIDE_ROWS, WIDE_ROWS_UNPACKED = 16, 3
"""On processors without matrix units for bf16, products of bf16 weights with at least this many
rows are faster in fp32; with fewer rows reading the weights decides, and bf16 halves that. The
second number is for weights in bf16 that cannot be packed."""
MIN_PLAIN_ROWS = 16
"""From this many rows on, the rows of a plain fp32 product do not depend on each other's number."""
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that are given the same input, by the names that transformers uses."""
_PROBED_ROWS = (1, 2, 7, 16, 33)

Find = Callable[[Tensor], Tensor]
"""The tensor to be used as a parameter."""
Pack = Callable[[Tensor, int], Tensor]
Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class Layout:
    """The weights of layers with the same input, laid out together; ``wide`` is their fp32 copy.
    Without ``weight`` few rows are multiplied with the parameters."""

    weight: Tensor | None
    bias: Tensor | None
    wide: Tensor | None
    wide_bias: Tensor | None

    @property
    def tensors(self) -> list[Tensor]:
        parts = (self.weight, self.bias, self.wide, self.wide_bias)
        return [item for item in parts if item is not None]

    @property
    def size_bytes(self) -> int:
        return sum(item.numel() * item.element_size() for item in self.tensors)


class PackedLinears:
    """Replaces the computation of every ``nn.Linear`` of ``model`` by its packed form.

    Where bf16 layers have a copy in fp32, passes of many rows are in fp32 from the embedding to the
    logits, if everything that multiplies is one of these layers: converting between layers costs a
    tenth of a step.
    """

    def __init__(self, model: nn.Module) -> None:
        self.wide_rows = _wide_rows(_linears(model))
        """From this many rows on, products are in fp32 though the weights are not."""
        self._forms = [_Packed(group, self.wide_rows) for group in _groups(model)]
        if self.wide_rows < sys.maxsize and _multiplies_only_in_linears(model):
            for module in model.modules():
                if isinstance(module, nn.Embedding):
                    embed = partial(_embed_wide, module.forward, self.wide_rows)
                    module.forward = embed  # type: ignore[method-assign]

    @property
    def layouts(self) -> list[Layout]:
        """What is computed with."""
        return [form.layout for form in self._forms]

    @property
    def tensors(self) -> list[Tensor]:
        """All that is computed with, in an order that stays the same."""
        return [item for form in self._forms for item in form.layout.tensors]

    def lay_out(self, find: Find, heed: Callable[[], None]) -> list[Layout]:
        """Other weights laid out, without using them yet; any thread. What ``heed`` raises between
        two layers ends it."""
        found = []
        for form in self._forms:
            heed()
            found.append(form.lay_out(find))
        return found

    def use(self, layouts: Sequence[Layout]) -> None:
        """Compute with these from here on."""
        for form, layout in zip(self._forms, layouts, strict=True):
            form.layout = layout

    @torch.inference_mode()
    def is_row_invariant(self) -> bool:
        """Whether rows alone and among others give the same bits in layers of every shape."""
        forms = {form.shape: form for form in self._forms}
        return all(_rows_agree(form) for form in forms.values())


def can_pack(model: nn.Module) -> bool:
    """Whether this build of torch has the packed product, and it works for the model's layers or
    for a copy of them in fp32."""
    layers = _linears(model)
    if not layers or layers[0].weight.device.type != "cpu":
        return False
    return _packs(layers[0].weight.dtype) or _wide_rows(layers) < sys.maxsize


@cache
def _packs(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    pack: Pack = torch.ops.mkldnn._reorder_linear_weight
    weight = torch.arange(48 * 32).remainder(7).view(48, 32).to(dtype)
    rows = torch.ones(3, 32, dtype=dtype)
    with torch.inference_mode():
        try:
            packed = _multiply(rows, pack(weight, ROWS_HINT), None)
        except RuntimeError:
            return False
        return torch.allclose(packed.float(), (rows @ weight.T).float(), rtol=1e-2, atol=1e-2)


def _linears(model: nn.Module) -> list[nn.Linear]:
    return [item for item in model.modules() if type(item) is nn.Linear]


def _wide_rows(layers: Sequence[nn.Linear]) -> int:
    """From how many rows on bf16 layers use a copy in fp32: never on processors that multiply bf16
    in tiles, nor where the copy would take more than a quarter of the memory."""
    weight = layers[0].weight if layers else None
    if weight is None or product_dtype(weight.dtype, weight.device) == weight.dtype:
        return sys.maxsize
    copy = sum(4 * layer.weight.numel() for layer in layers)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if copy > memory // 4 or not _packs(torch.float32):
        return sys.maxsize
    return WIDE_ROWS if _packs(weight.dtype) else WIDE_ROWS_UNPACKED


def _groups(model: nn.Module) -> Iterator[list[nn.Linear]]:
    """All linear layers, siblings together."""
    grouped: set[nn.Module] = set()
    for module in model.modules():
        for names in SIBLINGS:
            layers = [getattr(module, name, None) for name in names]
            found = [layer for layer in layers if type(layer) is nn.Linear]
            shapes = {(layer.in_features, layer.bias is None) for layer in found}
            if len(found) == len(names) and len(shapes) == 1:
                grouped.update(found)
                yield found
    for module in model.modules():
        if type(module) is nn.Linear and module not in grouped:
            yield [module]


def _multiplies_only_in_linears(model: nn.Module) -> bool:
    """Whether no other module has a matrix, which would not accept fp32 rows."""
    return all(
        type(module) is nn.Linear or isinstance(module, nn.Embedding) or parameter.dim() < 2
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )


def _embed_wide(forward: Callable[[Tensor], Tensor], wide_rows: int, ids: Tensor) -> Tensor:
    rows = forward(ids)
    return rows.float() if ids.numel() >= wide_rows else rows


class _Packed:
    """Layers with the same input."""

    def __init__(self, layers: Sequence[nn.Linear], wide_rows: int = sys.maxsize) -> None:
        self._layers = layers
        self._wide_rows = wide_rows
        self._sizes = [layer.out_features for layer in layers]
        self.shape = (sum(self._sizes), layers[0].in_features)
        self.dtype = layers[0].weight.dtype
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}
        self.layout = self.lay_out(lambda parameter: parameter.detach())
        for index, layer in enumerate(layers):
            layer.forward = partial(self._forward, index)  # type: ignore[method-assign]

    @torch.inference_mode()
    def lay_out(self, find: Find) -> Layout:
        pack: Pack = torch.ops.mkldnn._reorder_linear_weight
        weight = _stacked([find(layer.weight) for layer in self._layers])
        biases = [find(layer.bias) for layer in self._layers if layer.bias is not None]
        bias = torch.cat(biases) if biases else None
        packed = pack(weight, ROWS_HINT) if _packs(self.dtype) else None
        if self._wide_rows == sys.maxsize:
            return Layout(packed, bias, None, None)
        wide_bias = None if bias is None else bias.float()
        return Layout(packed, bias, pack(weight.float(), ROWS_HINT), wide_bias)

    def apply(self, x: Tensor) -> Tensor:
        """The outputs of all layers side by side, in the dtype of ``x``."""
        is_recording = torch._C._get_tracing_state() is not None
        multiply: Multiply = torch.ops.tandem.packed_linear if is_recording else _multiply
        layout = self.layout
        if layout.wide is not None and self._is_wide(x):
            return multiply(x.float(), layout.wide, layout.wide_bias).to(x.dtype)
        assert layout.weight is not None
        return multiply(x.to(self.dtype), layout.weight, layout.bias).to(x.dtype)

    def _is_wide(self, x: Tensor) -> bool:
        return x.numel() >= self._wide_rows * x.shape[-1]

    def _forward(self, index: int, x: Tensor) -> Tensor:
        """One layer's output. The first layer that is asked computes those of its siblings, which
        wait for the same input."""
        if self.layout.weight is None and not self._is_wide(x):
            layer = self._layers[index]
            return F.linear(x.to(self.dtype), layer.weight, layer.bias).to(x.dtype)
        if len(self._sizes) == 1:
            return self.apply(x)
        if self._input is not x or index not in self._outputs:
            self._input = x
            self._outputs = dict(enumerate(self.apply(x).split_with_sizes(self._sizes, dim=-1)))
        output = self._outputs.pop(index)
        if not self._outputs:
            self._input = None
        return output


def _stacked(weights: Sequence[Tensor]) -> Tensor:
    """The rows of all; without a copy where they lie one behind the other, as they travel."""
    first, *others = weights
    end = first.data_ptr() + first.nbytes
    for item in others:
        if item.data_ptr() != end or not item.is_contiguous():
            return torch.cat(list(weights))
        end += item.nbytes
    is_within = end <= first.untyped_storage().data_ptr() + first.untyped_storage().nbytes()
    if not is_within or not first.is_contiguous():
        return torch.cat(list(weights))
    rows = sum(item.shape[0] for item in weights)
    return first.as_strided((rows, first.shape[1]), first.stride(), first.storage_offset())


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


_library = torch.library.Library("tandem", "DEF")
_library.define("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.impl("packed_linear", _multiply, "MkldnnCPU")

PACKED_LINEAR = """graph(%x, %weight, %bias):
  %out : Tensor = tandem::packed_linear(%x, %weight, %bias)
  return (%out)"""
PACKED_LINEAR_KERNEL = """graph(%x, %weight, %bias):
  %attr : str = prim::Constant[value="none"]()
  %scalars : Scalar?[] = prim::ListConstruct()
  %algorithm : str = prim::Constant[value=""]()
  %out : Tensor = mkldnn::_linear_pointwise(%x, %weight, %bias, %attr, %scalars, %algorithm)
  return (%out)"""
"""The packed product in a recorded graph and what it stands for, which tracing cannot record."""


def _rows_agree(form: _Packed) -> bool:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(max(_PROBED_ROWS), form.shape[1], generator=generator).to(form.dtype)
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
