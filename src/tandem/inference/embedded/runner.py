"""From a plan to logits: the packed forward pass over the model and its cache.

What is computed is planned in ``plan``; what is drawn from the logits is the sampler's part.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.inference.embedded.lanes import Lanes
from tandem.inference.embedded.linears import PackedLinears, min_rows
from tandem.inference.embedded.plan import Chunk, Plan
from tandem.inference.embedded.recorded import RecordedDecode
from tandem.models.cache import CacheContext, ChunkGroup, KVCache

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Output:
    """``logits [num_sampled, V]`` in fp32; by row, log-probabilities of further prompt tokens."""

    logits: Tensor
    prompt_logprobs: dict[int, list[float]]


class Runner:
    """``packed`` are the model's packed layers, if it has any; without ``records`` decoding passes
    run as they are, from Python."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        packed: PackedLinears | None,
        *,
        is_fast: bool = False,
        records: bool = True,
    ) -> None:
        self._model = model
        self._cache = cache
        self._device: torch.device = model.device
        self._min_rows = min_rows(model, packed)
        self._is_fast = is_fast
        self._own = [*model.parameters(), *model.buffers()]
        self._packed = packed
        self.recorded = RecordedDecode(self._weights) if records else None

    def run(self, lanes: Lanes, plan: Plan) -> Output:
        """One forward pass; the cache must have room for every row's tokens."""
        if plan.num_decode == len(lanes):
            return Output(self._decode(lanes).float(), {})
        layout = _Layout(lanes, plan)
        tokens = self._tensor(_filled(layout.tokens, self._min_rows))
        positions = _filled(layout.positions, self._min_rows)
        context = CacheContext(
            self._cache,
            positions=positions[: plan.num_decode],
            groups=layout.groups,
            copies=plan.copies,
            is_fast=self._is_fast,
        )
        index, scored = layout.logit_index, layout.scored
        wanted = np.concatenate([index, *(item.index for item in scored)])
        logits = self._forward(tokens, self._tensor(positions), context, wanted)
        return Output(logits[: len(index)].float(), self._score(logits[len(index) :], scored))

    def _decode(self, lanes: Lanes) -> Tensor:
        """Logits of a pass in which every row decodes."""
        n = len(lanes)
        last = lanes.lengths - 1
        tokens = self._tensor(_filled(lanes.tokens[np.arange(n), last], self._min_rows))
        positions = self._tensor(_filled(last, self._min_rows))
        context = CacheContext(self._cache, positions=last, is_fast=self._is_fast)

        def plain() -> Tensor:
            output = self._model(
                input_ids=tokens[None], position_ids=positions[None], use_cache=False, ctx=context
            )
            logits: Tensor = output.logits[0]
            return logits

        rows = len(tokens)
        if self.recorded is None or not self._cache.num_layers:
            return plain()[:n]
        is_wide = self._packed is not None and rows >= self._packed.wide_rows
        decoded = context.decoded
        kind = (min(rows, 2), is_wide, n < rows, *decoded.form)
        inputs = [tokens, positions, *decoded.inputs]
        return self.recorded.run(kind, (n, *decoded.sizes), inputs, plain)[:n]

    def _weights(self) -> list[Tensor]:
        """All tensors of the model, as they are now."""
        packed = [] if self._packed is None else self._packed.tensors
        return [*self._own, *packed]

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
