"""From a plan to logits: the packed forward pass over the model and its cache.

What is computed is planned in ``plan``; what is drawn from the logits is the sampler's part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.inference.embedded.compiled import FIRST_KEYS, CompiledDecode, bucket
from tandem.inference.embedded.lanes import Lanes
from tandem.inference.embedded.plan import Chunk, Plan
from tandem.models.cache import CacheContext, ChunkGroup, KVCache

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Output:
    """``logits [num_sampled, V]`` in fp32; by row, log-probabilities of further prompt tokens."""

    logits: Tensor
    prompt_logprobs: dict[int, list[float]]


class Runner:
    """``min_rows`` (at least 1): passes with fewer tokens are filled up (see ``linears``)."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        *,
        min_rows: int,
        is_fast: bool = False,
        compile_mode: Literal["auto", "off", "on"] = "off",
    ) -> None:
        self._model = model
        self._cache = cache
        self._device: torch.device = model.device
        self._min_rows = min_rows
        self._is_fast = is_fast
        self._compiled = None
        if compile_mode != "off":
            self._compiled = CompiledDecode(self._all_logits, compile_mode)

    def run(self, lanes: Lanes, plan: Plan) -> Output:
        """One forward pass; the cache must have room for every row's tokens."""
        if self._compiled is not None and plan.num_decode == len(lanes):
            return Output(self._decode(self._compiled, lanes).float(), {})
        layout = _Layout(lanes, plan)
        tokens = self._tensor(_filled(layout.tokens, self._min_rows))
        positions = _filled(layout.positions, self._min_rows)
        positions_N = self._tensor(positions)
        decoded = positions[: plan.num_decode]
        context = CacheContext(
            self._cache,
            positions=positions_N[: plan.num_decode],
            max_position=int(decoded.max()) if plan.num_decode else 0,
            groups=layout.groups,
            copies=plan.copies,
            is_fast=self._is_fast,
        )
        index, scored = layout.logit_index, layout.scored
        wanted = np.concatenate([index, *(item.index for item in scored)])
        logits = self._forward(tokens, positions_N, context, wanted)
        return Output(logits[: len(index)].float(), self._score(logits[len(index) :], scored))

    def _decode(self, compiled: CompiledDecode, lanes: Lanes) -> Tensor:
        """Rows and keys are filled up to one of a few shapes; filler rows lie behind all others."""
        n = len(lanes)
        rows = max(bucket(n), self._min_rows)
        num_keys = bucket(int(lanes.lengths.max()), FIRST_KEYS)
        self._cache.reserve(rows, num_keys)
        last = lanes.lengths - 1
        tokens = self._tensor(_filled(lanes.tokens[np.arange(n), last], rows))
        positions = self._tensor(_filled(last, rows))
        context = CacheContext(
            self._cache,
            positions=positions,
            max_position=num_keys - 1,
            is_fast=self._is_fast,
        )
        context.prepare(self._model.dtype)
        shape = (rows, num_keys, *self._cache.shape)
        return compiled.run(shape, tokens, positions, context)[:n]

    def _all_logits(self, tokens: Tensor, positions: Tensor, context: CacheContext) -> Tensor:
        output = self._model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, ctx=context
        )
        logits: Tensor = output.logits[0]
        return logits

    def _forward(
        self, tokens: Tensor, positions: Tensor, context: CacheContext, wanted: Int64s
    ) -> Tensor:
        count = len(wanted)
        keep = self._tensor(_filled(wanted, self._min_rows))
        output = self._model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=keep,
            ctx=context,
        )
        logits: Tensor = output.logits[0, :count]
        return logits

    def _score(self, logits: Tensor, scored: list[_Scored]) -> dict[int, list[float]]:
        found = {}
        sizes = [len(item.index) for item in scored]
        for item, part in zip(scored, logits.split(sizes) if sizes else (), strict=True):
            targets = self._tensor(item.targets)[:, None]
            found[item.row] = part.float().log_softmax(-1).gather(1, targets)[:, 0].tolist()
        return found

    def _tensor(self, values: Int64s) -> Tensor:
        return torch.from_numpy(values).to(self._device)


@dataclass(frozen=True, slots=True)
class _Scored:
    """Packed positions whose logits score the prompt tokens ``targets`` of ``row``."""

    row: int
    index: Int64s
    targets: Int64s


class _Layout:
    """Where everything of a plan lies in the packed sequence: decoding rows, then groups of chunks
    with the same extent, which share their attention calls."""

    def __init__(self, lanes: Lanes, plan: Plan) -> None:
        n = plan.num_decode
        last = lanes.lengths[:n] - 1
        tokens, positions = [lanes.tokens[np.arange(n), last]], [last]
        self.groups: list[ChunkGroup] = []
        self.scored: list[_Scored] = []
        ends = np.arange(plan.num_sampled)
        offset = n
        for (start, stop), chunks in _by_extent(plan.chunks).items():
            rows = [chunk.row for chunk in chunks]
            self.groups.append(ChunkGroup(offset, start, stop, tuple(rows)))
            tokens.append(lanes.tokens[rows, start:stop].reshape(-1))
            positions.append(np.tile(np.arange(start, stop), len(rows)))
            for row in rows:
                offset += stop - start
                if row < plan.num_sampled:
                    ends[row] = offset - 1
                if lanes.jobs[row].needs_prompt_logprobs:
                    self._score(lanes, row, start, stop, offset)
        for row, twin in plan.twins.items():
            ends[row] = ends[twin]
        self.tokens, self.positions = np.concatenate(tokens), np.concatenate(positions)
        self.logit_index: Int64s = ends

    def _score(self, lanes: Lanes, row: int, start: int, stop: int, end: int) -> None:
        """The logits of a token are about the next one, if that belongs to the prompt."""
        targets = lanes.tokens[row, start + 1 : min(stop + 1, lanes.jobs[row].prompt_length)]
        first = end - (stop - start)
        self.scored.append(_Scored(row, np.arange(first, first + len(targets)), targets.copy()))


def _by_extent(chunks: list[Chunk]) -> dict[tuple[int, int], list[Chunk]]:
    groups: dict[tuple[int, int], list[Chunk]] = {}
    for chunk in chunks:
        groups.setdefault((chunk.start, chunk.stop), []).append(chunk)
    return groups


def _filled(values: Int64s, count: int) -> Int64s:
    """``values`` followed by zeros up to ``count``."""
    missing = count - len(values)
    return values if missing <= 0 else np.concatenate([values, np.zeros(missing, dtype=np.int64)])
