"""The critic's loss and how well it predicts. What does not belong here: advantages and returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from tandem.algorithms.tokens import under_mask
from tandem.errors import ConfigError
from tandem.types import Metric

if TYPE_CHECKING:
    from tensordict import TensorDict


def value_loss(
    values_BT: Tensor,
    old_values_BT: Tensor,
    returns_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``max((v - R)^2, (v_old + clip(v - v_old, -c, c) - R)^2) / 2`` per token, 0 outside the mask.

    ``clip=None`` leaves out the second term. ``vf_clipfrac`` marks tokens where it is the larger.
    """
    if clip is not None and not clip > 0:
        raise ConfigError(f"clip: got {clip!r}, allowed: None or a number > 0")
    values = under_mask(values_BT, mask_BT)
    returns = under_mask(returns_BT.detach(), mask_BT)
    plain = (values - returns) ** 2
    if clip is None:
        return 0.5 * plain, {}
    old = under_mask(old_values_BT.detach(), mask_BT)
    bounded = (old + (values - old).clamp(-clip, clip) - returns) ** 2
    return 0.5 * torch.maximum(plain, bounded), {"vf_clipfrac": bounded > plain}


def explained_variance(values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor) -> float | None:
    """``1 - Var(R - v) / Var(R)`` over the mask: 1 for a perfect critic, 0 for a constant one.

    None where the returns do not vary.
    """
    mask = mask_BT.bool()
    returns, values = returns_BT[mask].double(), values_BT[mask].double()
    if returns.numel() < 2 or float(returns.max() - returns.min()) == 0.0:
        return None
    return float(1.0 - (returns - values).var(correction=0) / returns.var(correction=0))


@dataclass(frozen=True, slots=True)
class ValueObjective:
    """``sum(value_loss_weights * value_loss)`` of a batch with ``values`` (old) and ``returns``."""

    clip: float | None = None

    required_outputs: ClassVar[frozenset[str]] = frozenset({"values"})

    def __call__(
        self, outputs: Mapping[str, Tensor], microbatch: TensorDict
    ) -> tuple[Tensor, dict[str, Metric]]:
        mask = microbatch["loss_mask"].bool()
        loss_BT, stats = value_loss(
            outputs["values"], microbatch["values"], microbatch["returns"], mask, clip=self.clip
        )
        count = mask.sum(dtype=torch.float32)
        clipped = {
            f"critic/{name}": Metric(
                (flags & mask).sum(dtype=torch.float32) / count.clamp(min=1), count
            )
            for name, flags in stats.items()
        }
        value = under_mask(outputs["values"].detach(), mask).sum() / count.clamp(min=1)
        loss = (microbatch["value_loss_weights"] * loss_BT).sum()
        return loss, {"critic/value_mean": Metric(value, count), **clipped}
