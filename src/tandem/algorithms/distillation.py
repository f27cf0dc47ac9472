"""On-policy distillation: the student samples, a teacher says what it would have done.

Two forms. On the sampled token alone, the divergence's policy gradient is that of an advantage. On
the teacher's ``K`` likeliest tokens it is computed as it is, over ``K + 1`` outcomes: these tokens,
and the rest taken together, which bounds the divergence from below and is exact for ``K = V``.
What does not belong here: where the term enters the loss (``objective``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tandem.algorithms.tokens import MAX_LOG_RATIO, under_mask
from tandem.errors import ConfigError, DataError

Divergence = Literal["forward", "reverse", "jsd"]


def reverse_kl_advantage(
    teacher_logprobs_BT: Tensor, student_logprobs_BT: Tensor, mask_BT: Tensor
) -> Tensor:
    """``log T - log pi`` of the sampled token, 0 outside the mask.

    With the loss ``-A log pi`` the expected gradient over ``y ~ pi`` is that of the token's
    ``KL(pi || T)`` (MiniLLM, arXiv 2306.08543, eq. 3, without the reward of later tokens; GKD,
    arXiv 2306.13649). The log-ratio is clamped to +-20.
    """
    return -_log_ratio(teacher_logprobs_BT, student_logprobs_BT, mask_BT)


def forward_kl_advantage(
    teacher_logprobs_BT: Tensor, student_logprobs_BT: Tensor, mask_BT: Tensor
) -> Tensor:
    """``T / pi - 1`` of the sampled token, 0 outside the mask.

    With the loss ``-A log pi`` the expected gradient over ``y ~ pi`` is that of the token's
    ``KL(T || pi)``, ``-sum_y T(y) grad log pi(y)``, importance-weighted to the student's samples;
    the 1 is a baseline. Its variance is large where the student hardly ever does what the teacher
    would.
    """
    return torch.expm1(-_log_ratio(teacher_logprobs_BT, student_logprobs_BT, mask_BT))


def _log_ratio(teacher: Tensor, student: Tensor, mask: Tensor) -> Tensor:
    gap = under_mask(student.detach(), mask) - under_mask(teacher.detach(), mask)
    return gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(frozen=True, slots=True)
class Likeliest:
    """A hook of a train engine: ids and log-probabilities of the ``count`` likeliest tokens."""

    count: int

    def __call__(self, logits_BTV: Tensor, _: object) -> list[tuple[Tensor, Tensor]]:
        if self.count > logits_BTV.shape[-1]:
            raise ConfigError(
                f"teacher.top_k: got {self.count}, allowed: up to the vocabulary, "
                f"{logits_BTV.shape[-1]}"
            )
        found = torch.log_softmax(logits_BTV, dim=-1).topk(self.count, dim=-1)
        return list(zip(found.indices.cpu(), found.values.cpu(), strict=True))


def topk_divergence(
    student_logprobs_BTK: Tensor,
    teacher_logprobs_BTK: Tensor,
    mask_BT: Tensor,
    *,
    divergence: str = "reverse",
) -> Tensor:
    """Divergence per token ``[B, T]``, 0 outside the mask; the teacher gets no gradient.

    ======= =============================================================================
    forward ``KL(T || pi) = sum_k T_k (log T_k - log pi_k)`` (Hinton, arXiv 1503.02531)
    reverse ``KL(pi || T) = sum_k pi_k (log pi_k - log T_k)`` (MiniLLM, arXiv 2306.08543)
    jsd     ``(KL(T || M) + KL(pi || M)) / 2``, ``M = (T + pi) / 2`` (GKD, arXiv 2306.13649, eq. 1)
    ======= =============================================================================

    The sums run over the ``K`` given tokens (log-probabilities of the whole vocabulary's
    distribution) and the rest. A rest below 16 units of rounding counts as that much, without
    gradient.
    """
    if divergence not in DIVERGENCES:
        raise ConfigError(f"divergence: got {divergence!r}, allowed: {', '.join(DIVERGENCES)}")
    if student_logprobs_BTK.shape != teacher_logprobs_BTK.shape:
        raise DataError(
            f"teacher_logprobs: got shape {tuple(teacher_logprobs_BTK.shape)}, expected "
            f"{tuple(student_logprobs_BTK.shape)}"
        )
    inside = mask_BT.bool()[..., None]
    # An even spread over K + 2 outcomes is harmless where nothing is wanted.
    filler = -math.log(student_logprobs_BTK.shape[-1] + 2)
    student = _with_rest(torch.where(inside, student_logprobs_BTK, filler))
    teacher = _with_rest(torch.where(inside, teacher_logprobs_BTK.detach(), filler))
    return under_mask(DIVERGENCES[divergence](teacher, student), mask_BT)


def _with_rest(logprobs: Tensor) -> Tensor:
    """``[..., K]`` log-probabilities with that of all other tokens together as the last."""
    floor = 16 * torch.finfo(logprobs.dtype).eps
    rest = (1.0 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=floor)
    return torch.cat([logprobs, rest.log()], dim=-1)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


def _forward(teacher: Tensor, student: Tensor) -> Tensor:
    return _kl(teacher, student)


def _reverse(teacher: Tensor, student: Tensor) -> Tensor:
    return _kl(student, teacher)


def _jsd(teacher: Tensor, student: Tensor) -> Tensor:
    middle = torch.logaddexp(teacher, student) - math.log(2.0)
    return 0.5 * (_kl(teacher, middle) + _kl(student, middle))


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward": _forward,
    "reverse": _reverse,
    "jsd": _jsd,
}
