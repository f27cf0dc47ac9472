"""Drawing one token for every running sequence from a batch of logits.

Order: logit bias, penalties, forbidden stop tokens, temperature, top-k, top-p, min-p, one draw by
inverse CDF. The recorded log-probability is of exactly that distribution; for greedy decoding it is
of the softmax at temperature 1. When a sequence ends is decided elsewhere.

Nothing that happens to a row depends on which others are in the batch. What only some rows ask for
is done for those rows alone (``filters`` has what hides tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.inference.embedded.filters import LogitFilters
from tandem.models.normaliser import SUM_BLOCK, ExpSums, Normaliser, combine_exp_sums, exp_sums
from tandem.types import GenerationConfig

UInt64s = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]

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
    """How one sequence is sampled: its options, seed (64 bits) and the tokens that may end it.

    ``raw`` and ``top`` ask for raw log-probabilities and for so many alternatives.
    """

    gconfig: GenerationConfig
    seed: int
    stop_ids: tuple[int, ...]
    raw: bool = False
    top: int = 0


@dataclass(frozen=True, slots=True)
class History:
    """Tokens so far: ``tokens [n, L]``, of which each row uses ``lengths`` after its prompt's."""

    tokens: Int64s
    prompt_lengths: Int64s
    lengths: Int64s


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token a row. ``raw_logprobs`` is NaN for rows that did not ask, ``None`` if nobody did;
    ``top`` has the alternatives ``(token, logprob)`` of the rows that did."""

    ids: Int64s
    logprobs: Float32s
    raw_logprobs: Float32s | None
    top: dict[int, list[tuple[int, float]]]


class Sampler:
    """The options of a fixed set of running sequences, laid out for batched use.

    Build a new one whenever the set changes; an option that is off for all rows costs nothing.
    """

    def __init__(self, rows: Sequence[SamplingRow], device: torch.device) -> None:
        configs = [row.gconfig for row in rows]
        self._device = device
        self._seeds = np.array([row.seed for row in rows], dtype=np.uint64)
        greedy = [config.is_greedy for config in configs]
        self._all_greedy = all(greedy)
        self._greedy = torch.tensor(greedy, device=device)[:, None] if any(greedy) else None
        heat = [1.0 if g else c.temperature for c, g in zip(configs, greedy, strict=True)]
        self._temperature = (
            torch.tensor(heat, dtype=torch.float32, device=device)[:, None]
            if any(value != 1.0 for value in heat)
            else None
        )
        self._filters = LogitFilters(configs, device)
        self._min_new = np.array([config.min_new_tokens for config in configs], dtype=np.int64)
        self._stop_ids = [row.stop_ids for row in rows]
        self._bias = _sparse_bias(configs, device)
        self._penalised = [i for i, config in enumerate(configs) if _is_penalised(config)]
        self._penalties = torch.tensor(
            [
                (c.repetition_penalty, c.presence_penalty, c.frequency_penalty)
                for c in (configs[i] for i in self._penalised)
            ],
            dtype=torch.float32,
            device=device,
        )
        self._raw_rows = [i for i, row in enumerate(rows) if row.raw]
        self._top_rows = [(i, row.top) for i, row in enumerate(rows) if row.top]

    def sample(self, logits: Tensor, history: History) -> Drawn:
        """Draw a token for every row. ``logits [n, V]`` (fp32) is overwritten.

        A row without a finite distribution gets log-probability NaN.
        """
        raw = logits[self._raw_rows] if self._raw_rows else None
        self._shape_logits(logits, history)
        best = logits.argmax(dim=-1, keepdim=True) if self._greedy is not None else None
        if self._temperature is not None:
            logits.mul_(self._temperature.reciprocal())
        self._filters.apply(logits)
        sums = exp_sums(logits)
        normaliser = combine_exp_sums([sums])
        if best is None or not self._all_greedy:
            uniform = torch.from_numpy(uniforms(self._seeds, history.lengths)).to(self._device)
            ids = draw(logits, sums, uniform)
            if best is not None and self._greedy is not None:
                ids = torch.where(self._greedy, best, ids)
        else:
            ids = best
        logprobs = normaliser.logprobs(logits.gather(1, ids)[:, 0])
        return Drawn(
            ids[:, 0].cpu().numpy(),
            logprobs.float().cpu().numpy(),
            self._raw(raw, ids),
            self._top(logits, normaliser),
        )

    def _raw(self, raw: Tensor | None, ids: Tensor) -> Float32s | None:
        if raw is None:
            return None
        logprobs = np.full(len(ids), np.nan, dtype=np.float32)
        picked = raw.log_softmax(dim=-1).gather(1, ids[self._raw_rows])
        logprobs[self._raw_rows] = picked[:, 0].cpu().numpy()
        return logprobs

    def _top(self, logits: Tensor, normaliser: Normaliser) -> dict[int, list[tuple[int, float]]]:
        """Hidden tokens are no alternatives."""
        found = {}
        for row, count in self._top_rows:
            values, ids = logits[row].topk(min(count, logits.shape[1]))
            logprobs = values - normaliser.top[row] - normaliser.log_total[row]
            pairs = zip(ids.tolist(), logprobs.tolist(), strict=True)
            found[row] = [pair for pair in pairs if pair[1] > float("-inf")]
        return found

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
        """Repetition over prompt and completion; presence and frequency over the completion.

        Only the logits of tokens that occurred are touched.
        """
        picked = np.array(self._penalised)
        width = int(history.lengths[picked].max())
        index = np.arange(width)
        is_token = index < history.lengths[picked, None]
        is_new = is_token & (index >= history.prompt_lengths[picked, None])
        first = history.tokens[picked, :1]
        tokens = torch.from_numpy(np.where(is_token, history.tokens[picked, :width], first))
        tokens = tokens.to(self._device)
        rows = torch.from_numpy(picked).to(self._device)
        counts = torch.zeros(len(picked), logits.shape[1], device=self._device)
        counts.scatter_add_(1, tokens, torch.from_numpy(is_new).to(self._device, torch.float32))
        made = counts.gather(1, tokens)
        repetition, presence, frequency = self._penalties.unsqueeze(-1).unbind(1)
        old = logits[rows[:, None], tokens]
        new = torch.where(old > 0, old / repetition, old * repetition)
        logits[rows[:, None], tokens] = new - presence * (made > 0) - frequency * made


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


def _is_penalised(config: GenerationConfig) -> bool:
    penalties = (config.repetition_penalty, config.presence_penalty, config.frequency_penalty)
    return penalties != (1.0, 0.0, 0.0)


def _sparse_bias(
    configs: Sequence[GenerationConfig], device: torch.device
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
        torch.tensor(rows, device=device),
        torch.tensor(tokens, device=device),
        torch.tensor(values, dtype=torch.float32, device=device),
    )
