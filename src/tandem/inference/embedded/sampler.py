"""Drawing one token for every running sequence from a batch of logits.

Order: logit bias, penalties, forbidden stop tokens, temperature, top-k, top-p, min-p, one draw by
inverse CDF. The recorded log-probability is of exactly that distribution; for greedy decoding it is
of the softmax at temperature 1. When a sequence ends is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.models.normaliser import SUM_BLOCK, ExpSums, combine_exp_sums, exp_sums
from tandem.types import GenerationConfig

UInt64s = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_MANTISSA_SHIFT = np.uint64(11)


def uniforms(seeds: UInt64s, positions: Int64s) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) that depend on nothing but (seed, position), by two rounds of splitmix64.

    ``position`` is the index of the token in the whole sequence, so that a completion continued as
    a new prompt draws what the uninterrupted one would have drawn.
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds + _GOLDEN) + _GOLDEN * (positions.astype(np.uint64) + np.uint64(1))
        bits = _mix(state) >> _MANTISSA_SHIFT
    uniform: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return uniform


def _mix(z: UInt64s) -> UInt64s:
    z = (z ^ (z >> _SHIFTS[0])) * _MULTIPLIERS[0]
    z = (z ^ (z >> _SHIFTS[1])) * _MULTIPLIERS[1]
    mixed: UInt64s = z ^ (z >> _SHIFTS[2])
    return mixed


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How one sequence is sampled: its options, seed (64 bits) and the tokens that may end it."""

    gconfig: GenerationConfig
    seed: int
    stop_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class History:
    """Tokens so far: ``tokens [n, L]``, of which each row uses ``lengths`` after its prompt's."""

    tokens: Int64s
    prompt_lengths: Int64s
    lengths: Int64s


def draw(logits_NV: Tensor, sums: ExpSums, uniform_N: Tensor) -> Tensor:
    """One token id a row ``[N, 1]`` by inverse CDF: first its block of the vocabulary, then itself.

    ``uniform_N`` are float64 in [0, 1). A row without a finite distribution gets any id.
    """
    top = sums.top.amax(1, keepdim=True)
    masses = sums.total.double() * (sums.top - top).double().exp()
    cdf = masses.cumsum(1)
    target = _below(uniform_N[:, None] * cdf[:, -1:], cdf)
    block = torch.searchsorted(cdf, target, right=True).clamp_(max=cdf.shape[1] - 1)
    target = (target - (cdf.gather(1, block) - masses.gather(1, block))).clamp_(min=0)
    width = min(SUM_BLOCK, logits_NV.shape[1])
    columns = block * SUM_BLOCK + torch.arange(width, device=block.device)
    inside = columns < logits_NV.shape[1]
    local = logits_NV.gather(1, columns.clamp(max=logits_NV.shape[1] - 1))
    cdf = ((local - top).double().exp() * inside).cumsum(1)
    index = torch.searchsorted(cdf, _below(target, cdf), right=True).clamp_(max=width - 1)
    return (block * SUM_BLOCK + index).clamp_(max=logits_NV.shape[1] - 1)


def _below(target: Tensor, cdf: Tensor) -> Tensor:
    """``target``, kept under the last entry of ``cdf`` where rounding reached it."""
    last = cdf[:, -1:]
    return torch.minimum(target, torch.nextafter(last, torch.zeros_like(last)))


class Sampler:
    """The options of a fixed set of running sequences, laid out for batched use.

    Build a new one whenever the set changes; an option that is off for all rows costs nothing.
    """

    def __init__(self, rows: Sequence[SamplingRow], device: torch.device) -> None:
        configs = [row.gconfig for row in rows]
        self._device = device
        self._seeds = np.array([row.seed for row in rows], dtype=np.uint64)
        greedy = [config.is_greedy for config in configs]
        self._greedy = self._floats(greedy, False, torch.bool)
        sampled = [(c, not g) for c, g in zip(configs, greedy, strict=True)]
        self._temperature = self._floats([c.temperature if s else 1.0 for c, s in sampled], 1.0)
        self._top_k = self._floats([c.top_k if s else 0 for c, s in sampled], 0, torch.int64)
        self._top_p = self._floats([c.top_p if s else 1.0 for c, s in sampled], 1.0)
        self._min_p = self._floats([c.min_p if s else 0.0 for c, s in sampled], 0.0)
        self._min_new = np.array([config.min_new_tokens for config in configs], dtype=np.int64)
        self._stop_ids = [row.stop_ids for row in rows]
        self._bias = self._sparse_bias(configs)
        self._penalised = [
            i
            for i, c in enumerate(configs)
            if (c.repetition_penalty, c.presence_penalty, c.frequency_penalty) != (1.0, 0.0, 0.0)
        ]
        self._penalties = torch.tensor(
            [
                (c.repetition_penalty, c.presence_penalty, c.frequency_penalty)
                for c in (configs[i] for i in self._penalised)
            ],
            dtype=torch.float32,
            device=device,
        )

    def sample(self, logits: Tensor, history: History) -> tuple[Int64s, npt.NDArray[np.float32]]:
        """Token ids and log-probabilities, one a row. ``logits [n, V]`` (fp32) is overwritten.

        A row without a finite distribution gets log-probability NaN.
        """
        self._shape_logits(logits, history)
        best = logits.argmax(dim=-1, keepdim=True) if self._greedy is not None else None
        if self._temperature is not None:
            logits.mul_(self._temperature.reciprocal())
        if self._top_k is not None or self._top_p is not None:
            self._keep_top(logits)
        if self._min_p is not None:
            floor = logits.amax(dim=-1, keepdim=True) + self._min_p.log()
            logits.masked_fill_(logits < floor, float("-inf"))
        uniform = torch.from_numpy(uniforms(self._seeds, history.lengths)).to(self._device)
        sums = exp_sums(logits)
        ids = draw(logits, sums, uniform)
        if self._greedy is not None and best is not None:
            ids = torch.where(self._greedy, best, ids)
        logprobs = combine_exp_sums([sums]).logprobs(logits.gather(1, ids)[:, 0])
        return ids[:, 0].cpu().numpy(), logprobs.float().cpu().numpy()

    def _shape_logits(self, logits: Tensor, history: History) -> None:
        if self._bias is not None:
            rows, ids, values = self._bias
            logits.index_put_((rows, ids), values, accumulate=True)
        if self._penalised:
            self._penalise(logits, history)
        early = np.flatnonzero(history.lengths - history.prompt_lengths < self._min_new)
        for row in early.tolist():
            logits[row, list(self._stop_ids[row])] = float("-inf")

    def _penalise(self, logits: Tensor, history: History) -> None:
        """Repetition over prompt and completion; presence and frequency over the completion."""
        rows = torch.tensor(self._penalised, device=self._device)
        picked = np.array(self._penalised)
        index = np.arange(history.tokens.shape[1])
        is_token = index < history.lengths[picked, None]
        is_new = is_token & (index >= history.prompt_lengths[picked, None])
        tokens = torch.from_numpy(np.where(is_token, history.tokens[picked], 0)).to(self._device)
        repetition, presence, frequency = self._penalties.unsqueeze(-1).unbind(1)

        def count(mask: npt.NDArray[np.bool_]) -> Tensor:
            ones = torch.from_numpy(mask.astype(np.float32)).to(self._device)
            return torch.zeros_like(logits[rows]).scatter_add_(1, tokens, ones)

        new = logits[rows]
        penalised = torch.where(new > 0, new / repetition, new * repetition)
        new = torch.where(count(is_token) > 0, penalised, new)
        made = count(is_new)
        logits[rows] = new - presence * (made > 0) - frequency * made

    def _keep_top(self, logits: Tensor) -> None:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        hidden = torch.zeros_like(ordered, dtype=torch.bool)
        if self._top_k is not None:
            rank = torch.arange(logits.shape[1], device=self._device)
            hidden |= (self._top_k > 0) & (rank >= self._top_k)
            ordered = ordered.masked_fill(hidden, float("-inf"))
        if self._top_p is not None:
            probs = ordered.softmax(dim=-1)
            before = probs.cumsum(dim=-1, dtype=torch.float64) - probs
            hidden |= (self._top_p < 1) & (before >= self._top_p)
        hidden[:, 0] = False
        logits.masked_fill_(hidden.scatter(1, order, hidden), float("-inf"))

    def _floats(
        self,
        values: Sequence[float | bool],
        neutral: float | bool,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor | None:
        """A column ``[n, 1]``, or ``None`` if every row has the neutral value."""
        if all(value == neutral for value in values):
            return None
        return torch.tensor(values, dtype=dtype, device=self._device)[:, None]

    def _sparse_bias(
        self, configs: Sequence[GenerationConfig]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        entries = [
            (row, token, value)
            for row, config in enumerate(configs)
            for token, value in config.logit_bias.items()
        ]
        if not entries:
            return None
        rows, tokens, values = zip(*entries, strict=True)
        return (
            torch.tensor(rows, device=self._device),
            torch.tensor(tokens, device=self._device),
            torch.tensor(values, dtype=torch.float32, device=self._device),
        )
