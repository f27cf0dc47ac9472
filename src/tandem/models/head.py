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
from tandem.models.normaliser import PIECE, SUM_BLOCK, combine_exp_sums, exp_sums
from tandem.models.processor import product_dtype


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
    vocabulary is walked in blocks, forward and backward. The weight is rounded to the dtype of
    ``hidden_NH``, in which the product runs (or in fp32, where the processor does that faster);
    everything after it is fp32 (float64 if the hidden states are). Differentiable with respect to
    hidden states, weight and bias, through the entropy too.
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
        projection = _Projection(hidden, weight, bias, temperature, chunk)
        chosen = torch.zeros_like(projection.scale[:, 0])
        sums = []
        logits = None
        for start in projection.starts:
            logits = projection.logits(start)
            inside, local = _targets_in(targets, start, logits)
            chosen[inside] = logits[inside, local]
            sums.append(exp_sums(logits, with_moments=with_entropy))
        normaliser = combine_exp_sums(sums)
        entropy = normaliser.entropy() if with_entropy else None
        logsumexp = normaliser.top + normaliser.log_total
        # A vocabulary that fits one block is kept: no second product in the backward pass.
        kept = logits if len(sums) == 1 else None
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, logsumexp, entropy, kept)
        ctx.chunk = chunk
        ctx.set_materialize_grads(False)  # an unused entropy costs nothing in the backward pass
        return normaliser.logprobs(chosen), entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature, logsumexp, entropy, kept = ctx.saved_tensors
        projection = _Projection(hidden, weight, bias, temperature, ctx.chunk)
        rows = projection.hidden
        of_logprob, of_entropy = grads
        scale = projection.scale[:, 0]
        slopes = _Slopes(logsumexp, of_logprob, of_entropy, entropy, scale)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = None
        if needs_hidden:
            grad_hidden = torch.zeros_like(hidden, dtype=projection.dtype)
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        for start in projection.starts:
            logits = projection.logits(start) if kept is None else kept
            grad = slopes.to_logits(logits, targets, start, projection.result(logits, kept))
            block = slice(start, start + grad.shape[1])
            if grad_hidden is not None:
                grad_hidden.add_(grad @ projection.weight(start))
            if grad_weight is not None:
                _product_into(grad_weight[block], grad.T, rows)
            if grad_bias is not None:
                grad_bias[block] = grad.sum(0).to(bias.dtype)
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


class _Projection:
    """Blocks of the logits, one after the other in the same memory.

    Fresh memory for every block would be handed out page by page and cleared by the system, which
    takes about as long as the arithmetic on it.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: Tensor,
        chunk: int,
    ) -> None:
        self.hidden = hidden.to(product_dtype(hidden.dtype, hidden.device))
        self._weight, self._bias, self._rounded_to = weight, bias, hidden.dtype
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.scale = temperature.to(self.dtype).reciprocal()[:, None]
        self._is_scaled = bool((self.scale != 1).any())
        self._size = _block_size(hidden.shape[0], weight.shape[0], chunk)
        self.starts = range(0, weight.shape[0], self._size)
        self._memory: dict[torch.dtype, Tensor] = {}
        self._weight_at = -1, weight

    def logits(self, start: int) -> Tensor:
        """Temperature-scaled logits of the block at ``start``; overwritten by the next call."""
        weight = self.weight(start)
        product = self._buffer(weight.dtype, weight.shape[0])
        torch.mm(self.hidden, weight.T, out=product)
        logits = product
        if product.dtype != self.dtype:
            logits = self._buffer(self.dtype, weight.shape[0]).copy_(product)
        if self._bias is not None:
            logits.add_(self._bias[start : start + self._size].to(self.dtype))
        return logits.mul_(self.scale) if self._is_scaled else logits

    def weight(self, start: int) -> Tensor:
        """Rows of the weight of the block at ``start``, in the dtype of the product."""
        if self._weight_at[0] != start:
            block = self._weight[start : start + self._size]
            self._weight_at = start, block.to(self._rounded_to).to(self.hidden.dtype)
        return self._weight_at[1]

    def result(self, logits: Tensor, kept: Tensor | None) -> Tensor:
        """Where the gradient of a block goes: over what it is made of, unless that is kept."""
        if kept is None and logits.dtype == self.hidden.dtype:
            return logits
        return self._buffer(self.hidden.dtype, logits.shape[1])

    def _buffer(self, dtype: torch.dtype, width: int) -> Tensor:
        rows = self.hidden.shape[0]
        if dtype not in self._memory:
            whole = rows * min(self._size, self._weight.shape[0])
            self._memory[dtype] = torch.empty(whole, dtype=dtype, device=self.hidden.device)
        return self._memory[dtype][: rows * width].view(rows, width)


class _Slopes:
    """Gradient to the logits z: ``-s p (g + e (log p + H))``, and ``s g`` more at the target.

    g and e are the gradients of log-probability and entropy H, s is one over the temperature.
    """

    def __init__(
        self,
        logsumexp: Tensor,
        grad_logprob: Tensor | None,
        grad_entropy: Tensor | None,
        entropy: Tensor | None,
        scale: Tensor,
    ) -> None:
        self._logsumexp, self._entropy = logsumexp, entropy
        zeros = torch.zeros_like(logsumexp)
        self._logprob = zeros if grad_logprob is None else grad_logprob * scale
        self._of_entropy = None
        if grad_entropy is not None and entropy is not None:
            self._of_entropy = grad_entropy * scale

    def to_logits(self, logits: Tensor, targets: Tensor, start: int, out: Tensor) -> Tensor:
        """Write the gradient to scaled logits of one block into ``out``, which may be ``logits``.

        Few rows at a time, so that every pass but the first finds them in the cache.
        """
        inside, local = _targets_in(targets, start, logits)
        at_targets = self._to(logits[inside, local][:, None], inside)[:, 0] + self._logprob[inside]
        rows = max(1, PIECE // (2 * logits.shape[1]))
        for first in range(0, logits.shape[0], rows):
            piece = slice(first, first + rows)
            out[piece] = self._to(logits[piece], piece)
        out[inside, local] = at_targets.to(out.dtype)
        return out

    def _to(self, logits: Tensor, rows: slice | Tensor) -> Tensor:
        log_probs = logits - self._logsumexp[rows, None]
        probs = log_probs.exp()
        if self._of_entropy is None or self._entropy is None:
            return probs.mul_(-self._logprob[rows, None])
        factor = log_probs.add_(self._entropy[rows, None]).mul_(-self._of_entropy[rows, None])
        return probs.mul_(factor.sub_(self._logprob[rows, None]))


def _product_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    else:
        out.copy_(left @ right)


def _block_size(rows: int, vocabulary: int, chunk: int) -> int:
    """Columns of one product: all, or a multiple of ``SUM_BLOCK``."""
    wanted = vocabulary if rows <= chunk else chunk * vocabulary // rows
    return vocabulary if wanted >= vocabulary else max(1, wanted // SUM_BLOCK) * SUM_BLOCK


def _targets_in(targets: Tensor, start: int, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Rows whose target lies in the block at ``start``, and its columns."""
    local = targets - start
    inside = ((local >= 0) & (local < logits.shape[1])).nonzero().squeeze(-1)
    return inside, local[inside]
