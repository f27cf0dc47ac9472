"""What the processor is good at. Which products a model makes belongs to their callers."""

from __future__ import annotations

from typing import Literal

import torch


def bf16_products() -> Literal["tiles", "vectors", "emulated"]:
    """How this CPU multiplies bfloat16: in tiles (AMX) many times as fast as float32, as vectors
    half as fast, or emulated (AVX2), eight times slower."""
    if torch.cpu._is_amx_tile_supported():
        return "tiles"
    mkldnn = torch.ops.mkldnn
    if torch.backends.mkldnn.is_available() and mkldnn._is_mkldnn_bf16_supported():
        return "vectors"
    return "emulated"


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """In which dtype many rows of ``dtype`` are multiplied.

    Where float32 is faster it loses nothing: it holds every product of two bfloat16 exactly.
    """
    if dtype != torch.bfloat16 or device.type != "cpu" or bf16_products() == "tiles":
        return dtype
    return torch.float32
