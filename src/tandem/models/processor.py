"""What the processor is good at. Which products a model makes belongs to their callers."""

from __future__ import annotations

import torch


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """In which dtype many rows of ``dtype`` are multiplied.

    Processors without tiles (AMX) multiply bfloat16 half as fast as float32, which holds every
    product of two bfloat16 exactly.
    """
    if dtype != torch.bfloat16 or device.type != "cpu" or torch.cpu._is_amx_tile_supported():
        return dtype
    return torch.float32
