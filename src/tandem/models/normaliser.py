"""The normaliser of a softmax over the vocabulary, summed up in blocks of fixed width.

Training walks the vocabulary in pieces and sampling has it whole; adding up the same blocks in the
same order gives both the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SUM_BLOCK = 256
"""Neighbouring entries of the vocabulary that are summed up together."""
PIECE = 1 << 18
"""Logits worked on at a time, in elements."""


@dataclass(frozen=True, slots=True)
class ExpSums:
    """Blocks of rows, ``[N, blocks]`` each: ``top`` the largest logit z, ``total`` the sum of
    ``exp(z - top)``, ``moment`` the sum of ``exp(z - top) (z - top)`` if asked for.
    """

    top: Tensor
    total: Tensor
    moment: Tensor | None


@dataclass(frozen=True, slots=True)
class Normaliser:
    """Of whole rows ``[N]``: ``logsumexp(z) = top + log_total``."""

    top: Tensor
    total: Tensor
    log_total: Tensor
    moment: Tensor | None

    def logprobs(self, chosen: Tensor) -> Tensor:
        """Log-probabilities of logits ``[N]``."""
        return chosen - self.top - self.log_total

    def entropy(self) -> Tensor:
        assert self.moment is not None
        return self.log_total - self.moment / self.total


def exp_sums(logits_NV: Tensor, *, with_moments: bool = False) -> ExpSums:
    """Block sums of rows that start at a multiple of ``SUM_BLOCK`` in the vocabulary.

    The last block may be narrower. A block that is -inf throughout sums to 0.
    """
    tops, totals, moments = [], [], []
    for view in _pieces(logits_NV):
        top = view.amax(-1)
        shifted = view - top.masked_fill(top == float("-inf"), 0.0).unsqueeze(-1)
        weights = shifted.exp() if with_moments else shifted.exp_()
        tops.append(top)
        totals.append(weights.sum(-1))
        if with_moments:
            moments.append(weights.mul_(shifted).sum(-1))
    moment = torch.cat(moments, 1) if with_moments else None
    return ExpSums(torch.cat(tops, 1), torch.cat(totals, 1), moment)


def _pieces(logits_NV: Tensor) -> Iterator[Tensor]:
    """Views ``[N, blocks, width]``, so small that what is computed from them stays in the cache."""
    rows, width = logits_NV.shape
    full = width - width % SUM_BLOCK
    step = max(1, PIECE // (rows * SUM_BLOCK)) * SUM_BLOCK
    for start in range(0, full, step):
        yield logits_NV[:, start : min(start + step, full)].view(rows, -1, SUM_BLOCK)
    if full < width:
        yield logits_NV[:, full:].unsqueeze(1)


def combine_exp_sums(parts: Sequence[ExpSums]) -> Normaliser:
    """The normaliser of whole rows from the blocks of all their pieces, in order."""
    tops = torch.cat([part.top for part in parts], 1)
    totals = torch.cat([part.total for part in parts], 1)
    top = tops.amax(1)
    shift = tops - top[:, None]
    scale = shift.exp()
    total = (totals * scale).sum(1)
    moment = None
    if parts[0].moment is not None:
        moments = torch.cat([part.moment for part in parts if part.moment is not None], 1)
        shift = shift.masked_fill(totals == 0, 0.0)
        moment = ((moments + totals * shift) * scale).sum(1)
    return Normaliser(top, total, total.log(), moment)
