"""Losses of preferences: DPO and its relatives and Bradley-Terry a pair, KTO a response.

What does not belong here: how pairs are found in a micro-batch (``preference_objective``),
tokenised and packed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.errors import ConfigError, DataError


def _sigmoid(margin: Tensor, beta: float, label_smoothing: float) -> Tensor:
    right, wrong = -F.logsigmoid(beta * margin), -F.logsigmoid(-beta * margin)
    return (1.0 - label_smoothing) * right + label_smoothing * wrong


def _hinge(margin: Tensor, beta: float, label_smoothing: float) -> Tensor:
    _no_smoothing("hinge", label_smoothing)
    return torch.relu(1.0 - beta * margin)


def _ipo(margin: Tensor, beta: float, label_smoothing: float) -> Tensor:
    _no_smoothing("ipo", label_smoothing)
    return (margin - 1.0 / (2.0 * beta)) ** 2


def _robust(margin: Tensor, beta: float, label_smoothing: float) -> Tensor:
    right, wrong = -F.logsigmoid(beta * margin), -F.logsigmoid(-beta * margin)
    noise = label_smoothing
    return ((1.0 - noise) * right - noise * wrong) / (1.0 - 2.0 * noise)


PREFERENCE_LOSSES: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "robust": _robust,
}


def preference_margin(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    len_chosen: Tensor | None = None,
    len_rejected: Tensor | None = None,
) -> Tensor:
    """Log-ratio to the reference of the chosen response less that of the rejected one, a pair.

    All are sums over a response's tokens. With both lengths each log-ratio is divided by its own:
    the convention that IPO's authors confirmed; the paper's text sums.
    """
    chosen = policy_chosen - ref_chosen.detach()
    rejected = policy_rejected - ref_rejected.detach()
    if (len_chosen is None) != (len_rejected is None):
        raise DataError("len_chosen, len_rejected: got only one, expected both or neither")
    if len_chosen is not None and len_rejected is not None:
        if bool((len_chosen < 1).any()) or bool((len_rejected < 1).any()):
            raise DataError("len_chosen, len_rejected: got 0, expected >= 1; drop such pairs")
        chosen, rejected = chosen / len_chosen, rejected / len_rejected
    return chosen - rejected


def preference_loss(
    margin: Tensor, loss_type: str = "sigmoid", *, beta: float = 0.1, label_smoothing: float = 0.0
) -> Tensor:
    """Loss of each pair from its ``preference_margin`` ``h``.

    ======= =====================================================================
    sigmoid ``-log sigmoid(beta h)`` (DPO, arXiv 2305.18290, eq. 7), label smoothing: cDPO
    hinge   ``max(0, 1 - beta h)`` (SLiC, arXiv 2305.10425)
    ipo     ``(h - 1 / (2 beta))^2`` (arXiv 2310.12036, eq. 17)
    robust  unbiased under labels wrong with probability ``e`` (``label_smoothing``):
            ``((1-e) l(h) - e l(-h)) / (1-2e)``, ``l`` the sigmoid loss (arXiv 2403.00409)
    ======= =====================================================================
    """
    if loss_type not in PREFERENCE_LOSSES:
        raise ConfigError(f"loss_type: got {loss_type!r}, allowed: {', '.join(PREFERENCE_LOSSES)}")
    _positive("beta", beta)
    if not 0 <= label_smoothing < 0.5:
        raise ConfigError(f"label_smoothing: got {label_smoothing!r}, allowed: in [0, 0.5)")
    return PREFERENCE_LOSSES[loss_type](margin, beta, label_smoothing)


def simpo_loss(
    mean_chosen: Tensor, mean_rejected: Tensor, *, beta: float = 2.0, gamma: float = 0.5
) -> Tensor:
    """``-log sigmoid(beta (m_chosen - m_rejected) - gamma)`` a pair (arXiv 2405.14734, eq. 6).

    ``m`` is a response's mean log-probability a token; there is no reference.
    """
    _positive("beta", beta)
    return -F.logsigmoid(beta * (mean_chosen - mean_rejected) - gamma)


def orpo_loss(mean_chosen: Tensor, mean_rejected: Tensor, *, beta: float = 0.1) -> Tensor:
    """``-m_chosen - beta log sigmoid(log odds ratio)`` a pair (arXiv 2403.07691, eq. 6 and 7).

    ``m`` is a response's mean log-probability a token, its odds ``exp(m) / (1 - exp(m))``. The
    first term, the SFT loss, is a mean a response here; TRL's is a mean over the batch's tokens.
    """
    _positive("beta", beta)
    ratio = _log_odds(mean_chosen) - _log_odds(mean_rejected)
    return -mean_chosen - beta * F.logsigmoid(ratio)


def kto_loss(
    log_ratio: Tensor,
    is_desirable: Tensor,
    baseline: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Loss of each response by its log-ratio ``r`` to the reference (arXiv 2402.01306, eq. 8).

    ``w (1 - sigmoid(beta (r - z)))`` where desirable, ``w (1 - sigmoid(beta (z - r)))`` where not.
    The ``baseline`` ``z`` estimates KL(policy || reference), at least 0, and gets no gradient.
    """
    _positive("beta", beta)
    gain = beta * (log_ratio - baseline.detach())
    desirable = desirable_weight * torch.sigmoid(-gain)
    undesirable = undesirable_weight * torch.sigmoid(gain)
    return torch.where(is_desirable.bool(), desirable, undesirable)


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> Tensor:
    """``-log sigmoid(r_chosen - r_rejected - margin)`` a pair (margin: arXiv 2307.09288, eq. 2)."""
    difference = chosen - rejected
    return -F.logsigmoid(difference if margin is None else difference - margin)


def pair_accuracy(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Fraction of pairs in which the chosen response scores strictly higher."""
    return (chosen > rejected).to(chosen.dtype).mean()


def last_token_scores(token_scores_BT: Tensor, attention_mask_BT: Tensor) -> Tensor:
    """The score at each row's last attended token, ``[B]``, for either side of padding.

    Read from the attention mask, so a padding id that equals the end token does no harm.
    """
    mask = attention_mask_BT.bool()
    if not bool(mask.any(dim=1).all()):
        raise DataError("attention_mask: got a row without any token; drop it")
    position = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, position, -1).amax(dim=1)
    return token_scores_BT.gather(1, last[:, None])[:, 0]


def _log_odds(logprob: Tensor) -> Tensor:
    """``log(p / (1 - p))``; a probability that rounds to 1 counts as the largest below it."""
    largest = torch.finfo(logprob.dtype).eps
    return logprob - torch.log(-torch.expm1(logprob.clamp(max=-largest)))


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{name}: got {value!r}, allowed: a number > 0")


def _no_smoothing(loss_type: str, label_smoothing: float) -> None:
    if label_smoothing:
        raise ConfigError(
            f"label_smoothing: got {label_smoothing!r}, allowed with loss_type {loss_type!r}: 0"
        )
