"""How close two computations of the same quantity must be. The only place that says so."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# (relative, absolute): a few dozen roundings of the dtype at the magnitude of a log-probability.
_TOLERANCES = {
    torch.float64: (1e-10, 1e-12),
    torch.float32: (1e-5, 1e-6),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float16: (2e-3, 2e-3),
}


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """``rtol`` and ``atol`` for ``torch.testing.assert_close`` and the like."""
    rtol, atol = _TOLERANCES[dtype]
    return {"rtol": rtol, "atol": atol}


def assert_close(actual: Any, expected: Any, *, dtype: torch.dtype | None = None) -> None:
    """Shapes equal, values within the tolerance of ``dtype`` (default: the less exact operand)."""
    left, right = torch.as_tensor(actual), torch.as_tensor(expected)
    used = dtype or _coarser(left, right)
    torch.testing.assert_close(left.to(used), right.to(used), **tolerance(used))


def _coarser(left: Tensor, right: Tensor) -> torch.dtype:
    floats = [item.dtype for item in (left, right) if item.dtype in _TOLERANCES]
    return max(floats, key=lambda dtype: _TOLERANCES[dtype][0], default=torch.float64)
