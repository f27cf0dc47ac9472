"""Log-probabilities and entropy of tokens from hidden states, without the full ``[N, V]`` logits.

The output projection and its exact gradient belong here; which positions are projected is decided
in ``data/packing``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tandem.errors import DataError
from tandem.models.invariant import ROWS
from tandem.models.normaliser import SUM_BLOCK, combine_exp_sums, exp_sums


def token_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor,
    *,
    with_entropy: bool,
    chunk: int,
    bias_V: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """fp32 log-probability of every target, and entropy, of ``softmax((h W' + b) / temperature)``.

    At most about ``chunk * V`` logits exist at a time (``SUM_BLOCK`` columns at least): the
    vocabulary is walked in blocks, forward and backward. The product runs in the dtype of
    ``hidden_NH``, everything after it in fp32 (float64 if the hidden states are). Differentiable
    with respect to hidden states, weight and bias, through the entropy too.
    """
    if chunk < 1:
        raise DataError(f"chunk: got {chunk}, allowed: an integer >= 1")
    num_tokens = hidden_NH.shape[0]
    if padding := max(0, ROWS - num_tokens):
        hidden_NH = F.pad(hidden_NH, (0, 0, 0, padding))
        targets_N, temperature_N = (
            F.pad(targets_N, (0, padding)),
            F.pad(temperature_N, (0, padding), value=1.0),
        )
    logprobs, entropy = _TokenLogprobs.apply(
        hidden_NH, weight_VH, bias_V, targets_N, temperature_N, with_entropy, chunk
    )
    return logprobs[:num_tokens], entropy[:num_tokens] if with_entropy else None


def candidate_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    logprobs_N: Tensor,
    candidates_NK: Tensor,
    temperature_N: Tensor,
    *,
    bias_V: Tensor | None = None,
    chunk: int = 1024,
) -> Tensor:
    """Log-probabilities ``[N, K]`` of further tokens, by the normaliser behind ``logprobs_N``.

    ``logprobs_N`` are those of ``targets_N`` as ``token_logprobs`` gives them, and carry the
    normaliser's gradient. The rows of ``weight_VH`` of ``chunk`` positions exist at a time.
    """
    ids_NC = torch.cat([targets_N[:, None], candidates_NK], dim=1)
    dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
    scale_N1 = temperature_N.to(dtype).reciprocal()[:, None]

    def logits(hidden: Tensor, ids: Tensor, scale: Tensor) -> Tensor:
        rows = weight_VH[ids].to(hidden.dtype)
        found = torch.bmm(rows, hidden[..., None]).squeeze(-1).to(dtype)
        return (found if bias_V is None else found + bias_V[ids].to(dtype)) * scale

    parts = [
        checkpoint(logits, *part, use_reentrant=False)
        for part in zip(
            hidden_NH.split(chunk), ids_NC.split(chunk), scale_N1.split(chunk), strict=True
        )
    ]
    logits_NC = torch.cat(parts)
    return logits_NC[:, 1:] - logits_NC[:, :1] + logprobs_N[:, None]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor,
        with_entropy: bool,
        chunk: int,
    ) -> tuple[Tensor, Tensor | None]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        scale = temperature.to(dtype).reciprocal()[:, None]
        size = _block_size(hidden.shape[0], weight.shape[0], chunk)
        is_whole = size >= weight.shape[0]
        chosen = torch.zeros_like(scale[:, 0])
        sums = []
        for start in range(0, weight.shape[0], size):
            logits = _logits(hidden, weight, bias, scale, start, size)
            _pick(chosen, logits, targets, start)
            # A vocabulary that fits one block is kept: no second product in the backward pass.
            kept = logits if is_whole else None
            sums.append(exp_sums(logits, with_moments=with_entropy))
            del logits
        normaliser = combine_exp_sums(sums)
        entropy = normaliser.entropy() if with_entropy else None
        logsumexp = normaliser.top + normaliser.log_total
        ctx.save_for_backward(hidden, weight, bias, targets, scale, logsumexp, entropy, kept)
        ctx.size = size
        ctx.set_materialize_grads(False)  # an unused entropy costs nothing in the backward pass
        return normaliser.logprobs(chosen), entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, scale, logsumexp, entropy, kept = ctx.saved_tensors
        grad_logprob, grad_entropy = grads
        if grad_logprob is None:
            grad_logprob = torch.zeros_like(logsumexp)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=scale.dtype) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        for start in range(0, weight.shape[0], ctx.size):
            if kept is None:
                log_probs = _logits(hidden, weight, bias, scale, start, ctx.size)
            else:
                log_probs = kept.clone()
            log_probs.sub_(logsumexp[:, None])
            grad = _logit_gradient(log_probs, grad_logprob, grad_entropy, entropy)
            _add_at_targets(grad, targets, start, grad_logprob)
            grad = grad.mul_(scale).to(hidden.dtype)
            block = slice(start, start + ctx.size)
            if grad_hidden is not None:
                grad_hidden.add_(grad @ weight[block].to(hidden.dtype))
            if grad_weight is not None:
                grad_weight[block] = (grad.T @ hidden).to(weight.dtype)
            if grad_bias is not None:
                grad_bias[block] = grad.sum(0).to(bias.dtype)
            del log_probs, grad
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _block_size(rows: int, vocabulary: int, chunk: int) -> int:
    """Columns of one product: all, or a multiple of ``SUM_BLOCK``."""
    wanted = vocabulary if rows <= chunk else chunk * vocabulary // rows
    return vocabulary if wanted >= vocabulary else max(1, wanted // SUM_BLOCK) * SUM_BLOCK


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, start: int, size: int
) -> Tensor:
    """Temperature-scaled logits of one block of the vocabulary, in the dtype of ``scale``."""
    block = slice(start, start + size)
    logits = (hidden @ weight[block].to(hidden.dtype).T).to(scale.dtype)
    if bias is not None:
        logits.add_(bias[block].to(scale.dtype))
    return logits.mul_(scale)


def _pick(chosen: Tensor, logits: Tensor, targets: Tensor, start: int) -> None:
    """Write the logits of those targets that lie in this block."""
    local = targets - start
    inside = ((local >= 0) & (local < logits.shape[1])).nonzero().squeeze(-1)
    chosen[inside] = logits[inside, local[inside]]


def _logit_gradient(
    log_probs: Tensor, grad_logprob: Tensor, grad_entropy: Tensor | None, entropy: Tensor | None
) -> Tensor:
    """Gradient to the scaled logits without the one-hot part: ``-p (g + e (log p + H))``."""
    probs = log_probs.exp()
    if grad_entropy is None or entropy is None:
        return probs.mul_(-grad_logprob[:, None])
    factor = log_probs.add_(entropy[:, None]).mul_(-grad_entropy[:, None])
    return probs.mul_(factor.sub_(grad_logprob[:, None]))


def _add_at_targets(grad: Tensor, targets: Tensor, start: int, grad_logprob: Tensor) -> None:
    local = targets - start
    inside = ((local >= 0) & (local < grad.shape[1])).nonzero().squeeze(-1)
    grad[inside, local[inside]] += grad_logprob[inside]
