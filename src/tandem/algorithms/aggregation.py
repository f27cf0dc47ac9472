"""How per-token losses become one number: weights, computed once per optimizer step.

``sum(weights * loss)`` over every token of the step is the loss, however the step is cut into
micro-batches and ranks. What does not belong here: the per-token losses themselves.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tandem.algorithms.tokens import Reduce, identity
from tandem.errors import ConfigError, DataError

AggregationMode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]
AGGREGATION_MODES: tuple[str, ...] = AggregationMode.__args__  # type: ignore[attr-defined]


def loss_weights(
    mode: str,
    loss_mask_BT: Tensor,
    *,
    sample_ids: Tensor | None = None,
    horizon: float | None = None,
    reduce: Reduce = identity,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weights ``[B, T]`` of the tokens of one optimizer step, 0 outside the mask.

    ======================= ====================================================================
    token-mean              mask / trained tokens (DAPO, arXiv 2503.14476)
    token-sum               mask
    seq-mean-token-sum      mask / trajectories
    seq-mean-token-mean     mask / (trained tokens of the trajectory * trajectories) (GRPO)
    seq-mean-token-sum-norm mask / (horizon * trajectories) (Dr. GRPO, arXiv 2503.20783)
    ======================= ====================================================================

    Trajectories without a trained token are not counted; rows with equal ``sample_ids [B]`` are one
    trajectory, which must lie on one rank. ``loss_mask_BT`` holds this rank's rows, and ``reduce``
    sums the denominators over data-parallel ranks, so every rank must call this with the same mode.
    Nothing to train anywhere: all zeros.
    """
    if mode not in AGGREGATION_MODES:
        raise ConfigError(f"aggregation: got {mode!r}, allowed: {', '.join(AGGREGATION_MODES)}")
    if loss_mask_BT.dim() != 2 or loss_mask_BT.is_nested:
        raise DataError(f"loss_mask: got shape {tuple(loss_mask_BT.shape)}, expected padded [B, T]")
    mask = loss_mask_BT.bool()
    tokens_B = mask.sum(dim=1, dtype=torch.float64)
    index_B, num_trajectories = _trajectories(mask, sample_ids)
    tokens_S = tokens_B.new_zeros(num_trajectories).index_add_(0, index_B, tokens_B)
    num_tokens, num_trained = reduce(torch.stack([tokens_B.sum(), (tokens_S > 0).sum()])).clamp(
        min=1
    )
    if mode == "token-sum":
        scale_B = torch.ones_like(tokens_B)
    elif mode == "token-mean":
        scale_B = (1.0 / num_tokens).expand_as(tokens_B)
    elif mode == "seq-mean-token-sum":
        scale_B = (1.0 / num_trained).expand_as(tokens_B)
    elif mode == "seq-mean-token-mean":
        scale_B = 1.0 / (tokens_S.clamp(min=1)[index_B] * num_trained)
    else:
        if horizon is None or not horizon > 0:
            raise ConfigError(
                f"horizon: got {horizon!r}, allowed: a number > 0, required by {mode}; "
                "use the longest completion, in tokens"
            )
        scale_B = (1.0 / (horizon * num_trained)).expand_as(tokens_B)
    return (mask * scale_B[:, None]).to(dtype)


def _trajectories(mask_BT: Tensor, sample_ids: Tensor | None) -> tuple[Tensor, int]:
    """Index of each row's trajectory and their number; without ids every row is one."""
    num_rows = mask_BT.shape[0]
    if sample_ids is None:
        return torch.arange(num_rows, device=mask_BT.device), num_rows
    if sample_ids.shape != (num_rows,):
        raise DataError(f"sample_ids: got shape {tuple(sample_ids.shape)}, expected [{num_rows}]")
    unique, index = torch.unique(sample_ids, return_inverse=True)
    return index, unique.numel()
