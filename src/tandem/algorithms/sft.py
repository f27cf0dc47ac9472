"""Supervised fine-tuning: cross entropy of the demonstrated tokens.

What does not belong here: preference losses, and which tokens are trained (``loss_mask``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tandem.algorithms.tokens import under_mask
from tandem.types import Metric

if TYPE_CHECKING:
    from tensordict import TensorDict


def sft_loss(
    outputs: Mapping[str, Tensor], microbatch: TensorDict
) -> tuple[Tensor, dict[str, Metric]]:
    """``sum(loss_weights * -log p(token))`` under ``loss_mask``."""
    mask = microbatch["loss_mask"].bool()
    nll = -under_mask(outputs["train_logprobs"], mask)
    loss = (microbatch["loss_weights"] * nll).sum()
    count = mask.sum(dtype=torch.float32)
    return loss, {"sft/nll": Metric(nll.detach().sum() / count.clamp(min=1), count)}
