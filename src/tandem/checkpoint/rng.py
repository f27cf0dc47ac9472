"""State of every global random generator, for tensors.py and state.py to store."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.errors import CheckpointError

logger = logging.getLogger(__name__)


def capture_rng() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State of ``random``, numpy's global generator, torch on the CPU and on every CUDA device."""
    numpy_state: Any = np.random.get_state(legacy=False)
    # safetensors and torch have no full support of uint32, so the key travels as int64.
    tensors = {
        "torch_cpu": torch.get_rng_state(),
        "numpy_key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
    }
    num_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(num_cuda):
        tensors[f"torch_cuda_{index}"] = torch.cuda.get_rng_state(index)
    state = {
        "python": random.getstate(),
        "numpy": {
            "bit_generator": str(numpy_state["bit_generator"]),
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "num_cuda": num_cuda,
    }
    return tensors, state


def restore_rng(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Put back what ``capture_rng`` returned. CUDA devices that this machine lacks are named in the
    log; their streams cannot go on elsewhere.

    Raises:
        CheckpointError: something is missing or malformed.
    """
    try:
        random.setstate(state["python"])
        _restore_numpy(tensors["numpy_key"], state["numpy"])
        torch.set_rng_state(tensors["torch_cpu"].cpu())
        saved = int(state["num_cuda"])
        present = torch.cuda.device_count() if torch.cuda.is_available() else 0
        for index in range(min(saved, present)):
            torch.cuda.set_rng_state(tensors[f"torch_cuda_{index}"].cpu(), index)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"random state: cannot be restored ({type(error).__name__}: {error}); resume from "
            "another checkpoint"
        ) from error
    if saved > present:
        logger.warning("random state of cuda:%d and above is not restored", present)


def _restore_numpy(key: Tensor, state: Mapping[str, Any]) -> None:
    np.random.set_state(
        {
            "bit_generator": state["bit_generator"],
            "state": {"key": key.numpy().astype(np.uint32), "pos": state["pos"]},
            "has_gauss": state["has_gauss"],
            "gauss": state["gauss"],
        }
    )
