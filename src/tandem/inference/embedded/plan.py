"""What the next forward pass computes: one token for rows that are complete in the cache, chunks of
the others within a budget of tokens, and nothing twice that two rows share.

Rows are taken in order, so the rows that get a token are always the first ones. Turning a plan into
tensors is the runner's part.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.inference.embedded.lanes import Lanes
from tandem.models.cache import RowCopy

PROMPT_LOGPROBS_CHUNK = 256
"""Rows that want the log-probabilities of their prompt need logits of all its positions."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``start`` to ``stop`` of ``row`` are computed in this pass."""

    row: int
    start: int
    stop: int


@dataclass(slots=True)
class Plan:
    """The first ``num_decode`` rows decode; the first ``num_sampled`` get a token.

    ``twins`` maps a row to the one before it that has the same tokens, whose logits serve both.
    """

    num_decode: int
    num_sampled: int
    chunks: list[Chunk] = field(default_factory=list)
    copies: list[RowCopy] = field(default_factory=list)
    twins: dict[int, int] = field(default_factory=dict)


def plan_pass(lanes: Lanes, budget: int) -> Plan:
    """Lay out one pass of at most ``budget`` tokens, decoding rows first."""
    lengths, cached = lanes.lengths, lanes.cached
    ready = (cached == lengths - 1) & (cached > 0)
    num_decode = len(lanes) if ready.all() else int((~ready).argmax())
    plan = Plan(num_decode, num_decode)
    if num_decode == len(lanes):
        return plan
    shared = _Shared(lanes)
    room = budget - num_decode
    for row in range(num_decode, len(lanes)):
        length, start = int(lengths[row]), int(cached[row])
        wants_prompt = lanes.jobs[row].needs_prompt_logprobs
        if start == 0 and not wants_prompt:
            twin = shared.twin(row)
            if twin is not None:
                plan.twins[row] = twin
                _copy(plan, twin, row, length)
                plan.num_sampled = row + 1
                continue
        if room <= 0:
            break
        if start == 0 and not wants_prompt:
            parent, start = shared.parent(row)
            if start:
                _copy(plan, parent, row, start)
        most = min(room, PROMPT_LOGPROBS_CHUNK) if wants_prompt else room
        stop = min(length, start + most)
        plan.chunks.append(Chunk(row, start, stop))
        room -= stop - start
        if stop < length:
            break
        plan.num_sampled = row + 1
        shared.add(row)
    return plan


def _copy(plan: Plan, source: int, target: int, count: int) -> None:
    last = plan.copies[-1] if plan.copies else None
    if last is not None and (last.source, last.count) == (source, count):
        plan.copies[-1] = RowCopy(source, (*last.targets, target), count)
    else:
        plan.copies.append(RowCopy(source, (target,), count))


class _Shared:
    """Rows by what they can give to others: all their tokens, or the beginning of their prompt."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._by_tokens: dict[bytes, int] = {}
        self._by_prefix: dict[bytes, int] = {}
        for row, job in enumerate(lanes.jobs):
            if lanes.cached[row] >= job.prompt_length and not job.is_mixed:
                self._offer_prompt(row)

    def add(self, row: int) -> None:
        """Row ``row`` is complete in this pass."""
        self._by_tokens.setdefault(self._lanes.sequence(row).tobytes(), row)
        if not self._lanes.jobs[row].is_mixed:
            self._offer_prompt(row)

    def twin(self, row: int) -> int | None:
        """A row completed in this pass that has exactly the same tokens."""
        if not self._by_tokens:
            return None
        return self._by_tokens.get(self._lanes.sequence(row).tobytes())

    def parent(self, row: int) -> tuple[int, int]:
        """The row that shares the longest prefix, and its length, short of the last token."""
        job = self._lanes.jobs[row]
        for count, key in reversed(job.prefixes):
            source = self._by_prefix.get(key)
            if source is not None:
                return source, min(count, int(self._lanes.lengths[row]) - 1)
        return row, 0

    def _offer_prompt(self, row: int) -> None:
        for _, key in self._lanes.jobs[row].prefixes:
            self._by_prefix.setdefault(key, row)
