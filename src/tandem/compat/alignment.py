"""The shift between our per-token tensors and those of verl and AReaL. The only place that has it.

Index t of ours speaks about token t; index t of theirs about token t + 1, which the model predicts
there. Of a value model, ours is the value of the state before token t, theirs of the state after.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.errors import DataError


def to_next_token(values_BT: Tensor, mask_BT: Tensor, last_B: Tensor | None = None) -> Tensor:
    """Our ``[B, T, ...]`` in their alignment; ``last_B`` or 0 at each row's last token.

    ``mask_BT`` is the attention mask, with padding on either side. Differentiable.
    """
    _check(values_BT, mask_BT)
    mask = mask_BT.bool()
    has_next = torch.zeros_like(mask)
    has_next[:, :-1] = mask[:, :-1] & mask[:, 1:]
    shifted = torch.cat([values_BT[:, 1:], torch.zeros_like(values_BT[:, :1])], dim=1)
    shifted = torch.where(_like(has_next, shifted), shifted, 0.0)
    if last_B is None:
        return shifted
    is_last = mask & ~has_next
    return torch.where(_like(is_last, shifted), last_B[:, None], shifted)


def from_next_token(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Their ``[B, T, ...]`` in our alignment; 0 at each row's first token. Differentiable."""
    _check(values_BT, mask_BT)
    mask = mask_BT.bool()
    has_previous = torch.zeros_like(mask)
    has_previous[:, 1:] = mask[:, 1:] & mask[:, :-1]
    shifted = torch.cat([torch.zeros_like(values_BT[:, :1]), values_BT[:, :-1]], dim=1)
    return torch.where(_like(has_previous, shifted), shifted, torch.zeros_like(shifted))


def _check(values_BT: Tensor, mask_BT: Tensor) -> None:
    if values_BT.is_nested or values_BT.shape[:2] != mask_BT.shape:
        raise DataError(
            f"alignment: expected padded values [B, T, ...] with mask {tuple(mask_BT.shape)}, "
            f"received shape {tuple(values_BT.shape)}"
        )


def _like(mask_BT: Tensor, values: Tensor) -> Tensor:
    return mask_BT.view(*mask_BT.shape, *(1,) * (values.ndim - 2))
