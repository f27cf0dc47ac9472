"""Hiding unlikely tokens: top-k, then top-p, then min-p. The sampler draws from the rest.

Every filter works on the rows that ask for it only, and what it keeps of a row depends on that row
alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.types import GenerationConfig

CANDIDATES = 1024
"""Top-k and top-p look at this many best tokens first; a row that needs more is sorted in full."""


class LogitFilters:
    """The filters of a fixed set of rows; greedy rows have none."""

    def __init__(self, configs: Sequence[GenerationConfig], device: torch.device) -> None:
        drawn = [(i, c) for i, c in enumerate(configs) if not c.is_greedy]
        ranked = [(i, c) for i, c in drawn if c.top_k > 0 or c.top_p < 1.0]
        self._ranked = torch.tensor([i for i, _ in ranked], dtype=torch.int64, device=device)
        self._top_k = torch.tensor([c.top_k for _, c in ranked], device=device)[:, None]
        self._top_p = torch.tensor([c.top_p for _, c in ranked], device=device)[:, None]
        floored = [(i, c.min_p) for i, c in drawn if c.min_p > 0.0]
        self._floored = torch.tensor([i for i, _ in floored], dtype=torch.int64, device=device)
        self._log_min_p = torch.tensor([p for _, p in floored], device=device)[:, None].log()

    def apply(self, logits: Tensor) -> None:
        """Set the logits ``[n, V]`` of hidden tokens to minus infinity."""
        if len(self._ranked):
            logits[self._ranked] = self._keep_top(logits[self._ranked])
        if len(self._floored):
            part = logits[self._floored]
            floor = part.amax(dim=-1, keepdim=True) + self._log_min_p
            logits[self._floored] = part.masked_fill_(part < floor, float("-inf"))

    def _keep_top(self, logits: Tensor) -> Tensor:
        if logits.shape[1] <= CANDIDATES:
            return _keep_sorted(logits, self._top_k, self._top_p)
        best, order = logits.topk(CANDIDATES)
        kept, is_enough = _kept(best, logits.logsumexp(-1, True), self._top_k, self._top_p)
        best.masked_fill_(~kept, float("-inf"))
        result = torch.full_like(logits, float("-inf")).scatter_(1, order, best)
        short = (~is_enough).nonzero()[:, 0]
        if len(short):
            result[short] = _keep_sorted(logits[short], self._top_k[short], self._top_p[short])
        return result


def _keep_sorted(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    kept, _ = _kept(ordered, logits.logsumexp(-1, True), top_k, top_p)
    return torch.full_like(logits, float("-inf")).scatter_(
        1, order, ordered.masked_fill(~kept, float("-inf"))
    )


def _kept(
    ordered: Tensor, log_total: Tensor, top_k: Tensor, top_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Which of the best tokens, in order, are kept; and for which rows these are all.

    ``log_total [n, 1]`` is of the whole row. Top-p is over what top-k kept.
    """
    width = ordered.shape[1]
    rank = torch.arange(width, device=ordered.device)
    by_rank = (top_k == 0) | (rank < top_k)
    masked = ordered.masked_fill(~by_rank, float("-inf"))
    log_kept = torch.where(top_k > 0, masked.logsumexp(-1, True), log_total)
    probs = (masked - log_kept).exp()
    before = probs.cumsum(dim=-1, dtype=torch.float64) - probs
    kept = by_rank & ((top_p >= 1.0) | (before < top_p))
    kept[:, 0] = True
    reached = (before[:, -1] + probs[:, -1] >= top_p[:, 0]) & (top_p[:, 0] < 1.0)
    is_enough = torch.where(top_k[:, 0] > 0, top_k[:, 0] <= width, reached)
    return kept, is_enough
