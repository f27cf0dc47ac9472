"""The tolerance helper itself: by dtype, and strict about shape."""

from __future__ import annotations

import pytest
import torch

from tests.tolerance import assert_close


@pytest.mark.parametrize(
    ("dtype", "passes", "fails"),
    [(torch.float64, 1e-11, 1e-9), (torch.float32, 5e-6, 5e-5), (torch.bfloat16, 1e-2, 1e-1)],
)
def test_tolerance_follows_the_dtype(dtype: torch.dtype, passes: float, fails: float) -> None:
    one = torch.ones(3, dtype=torch.float64)
    assert_close(one + passes, one, dtype=dtype)
    with pytest.raises(AssertionError):
        assert_close(one + fails, one, dtype=dtype)


def test_less_exact_operand_decides_and_shapes_must_match() -> None:
    assert_close(torch.tensor([1.005], dtype=torch.bfloat16), torch.ones(1))
    with pytest.raises(AssertionError):
        assert_close(torch.ones(3), torch.ones(1))
