"""Decoding passes as a recorded list of operators, run without Python.

Recording runs the model once under torch's tracer; what is left is its operators in their
order, so the bits are those of the plain pass, at a half to four fifths of the time. Sizes stay
variable: one recording serves any number of rows and keys. Weights, caches and masks are arguments,
so that an exchange of weights needs no new one. A model whose Python looks at values cannot be
recorded (a mixture of experts that loops over the experts in use); its passes run as they are.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tandem.inference.embedded.linears import PACKED_LINEAR, PACKED_LINEAR_KERNEL

logger = logging.getLogger(__name__)

Pass = Callable[[], Tensor]
Kind = tuple[int | bool, ...]
WARM_PASSES = 32
"""Passes of a kind before it is recorded: recording costs about as much as eighty save."""
CHECKED_SHAPES = 8
"""So many numbers of rows and keys are compared with the plain pass when they first occur."""
_OWN_CODE = str(Path(__file__).parents[2])
_CONVERSIONS = ("__bool__", "__int__", "__float__", "__index__", "__len__", "__iter__", "__array__")
_READING = frozenset({*_CONVERSIONS, "item", "numpy", "tolist"})
_SIZED_BY_VALUES = frozenset(
    {"aten::nonzero", "aten::masked_select", "aten::unique_dim", "aten::_unique2", "aten::bincount"}
)


class RecordedDecode:
    """Runs passes recorded where that is possible and gives the same bits, else as they are.

    ``weights`` returns every tensor that an update of the weights may replace, in a fixed order.
    """

    def __init__(self, weights: Callable[[], Sequence[Tensor]]) -> None:
        self._weights = weights
        self._num_passes: dict[Kind, int] = {}
        self._recordings: dict[Kind, _Recording] = {}
        self.refusal: str | None = None
        """Why this model's passes run as they are; None while they are recorded, or may be."""

    @property
    def num_recorded(self) -> int:
        """Kinds of passes that run recorded."""
        return len(self._recordings)

    def run(
        self, kind: Kind, shape: Sequence[int], inputs: Sequence[Tensor], plain: Pass
    ) -> Tensor:
        """What ``plain()`` returns. It may read ``inputs`` and the weights and no other tensor that
        differs between passes, and branch on nothing but ``kind``. ``shape`` is what else differs.
        """
        if self.refusal is not None:
            return plain()
        if (recording := self._recordings.get(kind)) is None:
            passes = self._num_passes[kind] = self._num_passes.get(kind, 0) + 1
            if passes <= WARM_PASSES:
                return plain()
        arguments = [*inputs, *self._weights()]
        try:
            if recording is None:
                recording = self._recordings[kind] = _record(plain, arguments)
            if recording.knows(shape):
                return recording(arguments)
            return self._checked(recording, arguments, plain)
        except _NotRecordable as error:
            self.refusal = str(error)
            self._recordings.clear()
            logger.warning("decoding runs operator by operator from Python: %s", error)
            return plain()

    @staticmethod
    def _checked(recording: _Recording, arguments: Sequence[Tensor], plain: Pass) -> Tensor:
        """Running a pass again is harmless: it writes the same keys and values."""
        expected = plain()
        try:
            is_equal = torch.equal(recording(arguments), expected)
        except RuntimeError as error:
            raise _NotRecordable(f"the recorded pass fails at other sizes: {error}") from error
        if not is_equal:
            raise _NotRecordable("the recorded pass does not give the bits of the plain one")
        return expected


class _NotRecordable(Exception):
    """Why a pass cannot be recorded."""


class _Recording:
    """One recorded pass, to be called with current arguments in the order of the first ones."""

    def __init__(self, graph: Any) -> None:
        self._used = _drop_unused(graph)
        _refuse_what_depends_on_values(graph)
        self._function = torch._C._create_function_from_graph("decode", graph)
        self._shapes: set[tuple[int, ...]] = set()

    def knows(self, shape: Sequence[int]) -> bool:
        """Whether nothing is to be compared any more; notes the shape."""
        if len(self._shapes) >= CHECKED_SHAPES or tuple(shape) in self._shapes:
            return True
        self._shapes.add(tuple(shape))
        return False

    def __call__(self, arguments: Sequence[Tensor]) -> Tensor:
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            out: Tensor = self._function(*(arguments[index] for index in self._used))
        return out


def _record(plain: Pass, arguments: Sequence[Tensor]) -> _Recording:
    """``plain``, with whatever torch does not do for it as ``_NotRecordable``."""
    try:
        return _Recording(_cleaned(_trace(plain, arguments)))
    except _NotRecordable:
        raise
    except Exception as error:
        raise _NotRecordable(f"torch's tracer: {error}") from error


def _trace(plain: Pass, arguments: Sequence[Tensor]) -> Any:
    """The graph of ``plain``, in which tensors among ``arguments`` are recognised by identity."""
    with _Unread():
        graph, _ = torch._C._create_graph_by_tracing(
            lambda *_: plain(), tuple(arguments), lambda _: "", True, False, None, []
        )
    return graph


class _Unread(TorchFunctionMode):
    """Refuses a model's code that makes numbers of tensors, to which sizes belong while tracing.

    Our own code may: what it branches on is in the kind of a pass.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.__name__ not in _READING:
            return func(*args, **(kwargs or {}))
        caller = sys._getframe(1)
        if not caller.f_code.co_filename.startswith(_OWN_CODE):
            where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
            raise _NotRecordable(f"{where} asks a tensor for its value ({func.__name__})")
        state = torch._C._get_tracing_state()
        torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
        try:
            return func(*args, **(kwargs or {}))
        finally:
            torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


def _cleaned(graph: Any) -> Any:
    torch._C._jit_pass_inline(graph)
    torch._C._jit_pass_custom_pattern_based_rewrite_graph(
        PACKED_LINEAR, PACKED_LINEAR_KERNEL, graph
    )
    _skip_conversions_to_same(graph)
    torch._C._jit_pass_cse(graph)
    torch._C._jit_pass_peephole(graph, True)
    torch._C._jit_pass_dce(graph)
    return graph


def _skip_conversions_to_same(graph: Any) -> None:
    """Calls of ``to`` that give back what they got."""
    for node in graph.findAllNodes("aten::to"):
        source, out = node.inputsAt(0), node.output()
        if source.type().kind() != "TensorType" or source.type().dtype() != out.type().dtype():
            continue
        names_only_dtype = node.schema().startswith("aten::to.dtype(")
        copies = names_only_dtype and node.inputsAt(3).toIValue()
        if names_only_dtype and copies is False:
            out.replaceAllUsesWith(source)


def _drop_unused(graph: Any) -> list[int]:
    """Remove arguments that nothing reads; the indices of those that stay."""
    inputs = list(graph.inputs())
    used = [bool(value.uses()) for value in inputs]
    for index in reversed(range(len(inputs))):
        if not used[index]:
            graph.eraseInput(index)
    return [index for index, is_used in enumerate(used) if is_used]


def _refuse_what_depends_on_values(graph: Any) -> None:
    for node in _nodes(graph):
        if node.kind() in _SIZED_BY_VALUES:
            raise _NotRecordable(f"{node.kind()}: the size of its result depends on values")
        if node.kind() == "prim::Constant" and node.output().type().kind() == "TensorType":
            constant = node.t("value")
            if constant.numel() > 1:
                raise _NotRecordable(
                    f"a tensor of shape {list(constant.shape)} is neither a weight nor computed"
                )


def _nodes(block: Any) -> Iterable[Any]:
    for node in block.nodes():
        yield node
        yield from itertools.chain.from_iterable(map(_nodes, node.blocks()))
