"""From rows to packed micro-batches: which rows run together, and the one next-token shift.

Cutting under a token cap, balancing, packing without padding and the way back belong here. The
attention over packed segments is in ``models/packed``.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from tandem.errors import DataError

# --- packing and the next-token shift -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of a ``[B, T]`` batch laid end to end, and where every predicted token belongs.

    ``M`` counts predicted tokens: the token ``targets[m]`` of row ``rows[m]`` is predicted by the
    hidden state at packed position ``sources[m]`` and sits at ``slots[m]`` of the flattened batch.
    """

    input_ids: Tensor  # [1, N]
    position_ids: Tensor  # [1, N], restarting in every segment
    lengths: tuple[int, ...]  # of the segments: the rows that have tokens
    sources: Tensor  # [M]
    targets: Tensor  # [M]
    slots: Tensor  # [M]
    rows: Tensor  # [M]
    segment_rows: Tensor  # [S], the row that each segment is
    lasts: Tensor  # [S], the packed position of each segment's last token
    shape: tuple[int, int]  # (B, T)
    candidates: Tensor | None = None  # [M, K], further tokens to score in the place of each target

    def unpack(self, values: Tensor) -> Tensor:
        """Per-prediction values ``[M, ...]`` as ``[B, T, ...]``, zero where nothing is predicted.

        Differentiable.
        """
        size = (self.shape[0] * self.shape[1], *values.shape[1:])
        dense = values.new_zeros(size).index_copy(0, self.slots, values)
        return dense.view(*self.shape, *values.shape[1:])

    def last_of_rows(self, values_N: Tensor) -> Tensor:
        """The value at each row's last token, ``[B]``, zero for rows without tokens.

        Differentiable.
        """
        dense = values_N.new_zeros(self.shape[0])
        return dense.index_copy(0, self.segment_rows, values_N[self.lasts])

    def part(self, number: int, count: int) -> PackedRows:
        """Slice ``number`` of ``count`` contiguous ones of equal length of the packed sequence.

        A segment of its own fills up the end. Positions, targets and ``lengths`` stay those of the
        whole, ``sources`` and ``lasts`` count from the start of the slice, and what ``unpack`` and
        ``last_of_rows`` give for all slices adds up to what they give for the whole.
        """
        num_tokens = self.input_ids.shape[1]
        size = -(-num_tokens // count)
        padding, start = size * count - num_tokens, size * number
        predicted = _within(self.sources, start, size)
        ended = _within(self.lasts, start, size)
        return replace(
            self,
            input_ids=F.pad(self.input_ids, (0, padding))[:, start : start + size],
            position_ids=F.pad(self.position_ids, (0, padding))[:, start : start + size],
            lengths=(*self.lengths, padding) if padding else self.lengths,
            sources=self.sources[predicted] - start,
            targets=self.targets[predicted],
            slots=self.slots[predicted],
            rows=self.rows[predicted],
            segment_rows=self.segment_rows[ended],
            lasts=self.lasts[ended] - start,
            candidates=None if self.candidates is None else self.candidates[predicted],
        )

    def to(self, device: torch.device) -> PackedRows:
        names = (
            "input_ids",
            "position_ids",
            "sources",
            "targets",
            "slots",
            "rows",
            "segment_rows",
            "lasts",
        )
        moved = {name: getattr(self, name).to(device) for name in names}
        candidates = None if self.candidates is None else self.candidates.to(device)
        return replace(self, **moved, candidates=candidates)


def pack(
    input_ids_BT: Tensor,
    attention_mask_BT: Tensor,
    *,
    position_ids_BT: Tensor | None = None,
    predict_BT: Tensor | None = None,
    candidates_BTK: Tensor | None = None,
) -> PackedRows:
    """Drop the padding (on either side) and lay the rows end to end.

    Every token except the first of its row is predicted, by the position before it; ``predict_BT``
    narrows that to the tokens whose log-probability is wanted.
    """
    flat = attention_mask_BT.reshape(-1).nonzero().squeeze(-1)
    lengths = attention_mask_BT.sum(1)
    rows = torch.repeat_interleave(lengths)
    tokens = input_ids_BT.reshape(-1)[flat]
    offsets = torch.arange(len(flat), device=flat.device) - (lengths.cumsum(0) - lengths)[rows]
    positions = offsets if position_ids_BT is None else position_ids_BT.reshape(-1)[flat]
    is_predicted = offsets > 0
    if predict_BT is not None:
        is_predicted &= predict_BT.reshape(-1)[flat]
    predicted = is_predicted.nonzero().squeeze(-1)
    slots = flat[predicted]
    return PackedRows(
        input_ids=tokens[None],
        position_ids=positions[None],
        lengths=tuple(length for length in lengths.tolist() if length),
        sources=predicted - 1,
        targets=tokens[predicted],
        slots=slots,
        rows=rows[predicted],
        segment_rows=lengths.nonzero().squeeze(-1),
        lasts=lengths.cumsum(0)[lengths > 0] - 1,
        shape=(input_ids_BT.shape[0], input_ids_BT.shape[1]),
        candidates=None if candidates_BTK is None else candidates_BTK.flatten(0, 1)[slots],
    )


def dummy_rows(num_candidates: int = 0) -> PackedRows:
    """One row of two tokens, for a rank that must take part in a step without data."""
    ids = torch.zeros(1, 2, dtype=torch.int64)
    mask = torch.ones_like(ids, dtype=torch.bool)
    return pack(ids, mask, candidates_BTK=ids.new_zeros(1, 2, num_candidates))


def _within(positions: Tensor, start: int, size: int) -> Tensor:
    """Indices of the positions that lie in the ``size`` ones from ``start`` on."""
    return ((positions >= start) & (positions < start + size)).nonzero().squeeze(-1)


# --- cutting --------------------------------------------------------------------------------------


def cut_microbatches(
    lengths: Sequence[int],
    *,
    max_tokens: int,
    max_items: int | None = None,
    groups: Sequence[int] | None = None,
    agree: Callable[[int], int] | None = None,
) -> list[list[int]]:
    """Row numbers of each micro-batch; the same input gives the same cut on every machine.

    No micro-batch has more than ``max_tokens`` tokens or ``max_items`` items, where an item is a
    row, or all rows that share an entry of ``groups``. ``agree`` turns the own count into the one
    all ranks use (their maximum): bins are split to reach it, and only when every bin is down to
    one item do empty ones follow, to be run as zero-weight dummies.

    Raises:
        DataError: a row, or a group that must stay together, is longer than the cap.
    """
    items = _items(lengths, groups)
    sizes = [sum(lengths[row] for row in item) for item in items]
    _check_cap(items, sizes, max_tokens, is_grouped=groups is not None)
    bins = first_fit_decreasing(sizes, max_tokens, max_items)
    balanced = karmarkar_karp(sizes, len(bins)) if bins else []
    if all(
        sum(sizes[i] for i in part) <= max_tokens and len(part) <= (max_items or len(part))
        for part in balanced
    ):
        bins = balanced
    count = len(bins) if agree is None else agree(len(bins))
    bins = _split_to(bins, sizes, count)
    rows = sorted(sorted(row for i in part for row in items[i]) for part in bins)
    return rows + [[] for _ in range(count - len(rows))]


def deal_rows(
    lengths: Sequence[int], num_shares: int, *, groups: Sequence[int] | None = None
) -> list[list[int]]:
    """Row numbers of each share, nearly equal in tokens; each row is in exactly one.

    Rows that share an entry of ``groups`` stay together. With fewer such items than shares some
    shares are empty.
    """
    items = _items(lengths, groups)
    sizes = [sum(lengths[row] for row in item) for item in items]
    parts = karmarkar_karp(sizes, num_shares)
    return [sorted(row for i in part for row in items[i]) for part in parts]


def first_fit_decreasing(
    lengths: Sequence[int], cap: int, max_items: int | None = None
) -> list[list[int]]:
    """Indices of ``lengths`` in as few bins as first-fit decreasing finds, no bin over ``cap``.

    Raises:
        DataError: one length is over the cap.
    """
    _check_cap([[i] for i in range(len(lengths))], lengths, cap, is_grouped=False)
    bins: list[list[int]] = []
    loads: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for number, load in enumerate(loads):
            has_room = max_items is None or len(bins[number]) < max_items
            if has_room and load + lengths[index] <= cap:
                bins[number].append(index)
                loads[number] += lengths[index]
                break
        else:
            bins.append([index])
            loads.append(lengths[index])
    return bins


def karmarkar_karp(lengths: Sequence[int], k: int) -> list[list[int]]:
    """Indices of ``lengths`` in ``k`` parts of nearly equal sums; no part empty if there are ``k``.

    Largest differencing method: the two partial partitions with the largest spread are merged,
    the heaviest parts of one with the lightest of the other; equal sums go by member count.
    """
    if k < 1:
        raise DataError(f"karmarkar_karp: k: got {k}, allowed: an integer >= 1")
    if not lengths:
        return [[] for _ in range(k)]
    heap: list[tuple[tuple[int, int], int, list[tuple[int, list[int]]]]] = []
    for index, length in enumerate(lengths):
        parts = [(length, [index])] + [(0, []) for _ in range(k - 1)]
        heapq.heappush(heap, (_spread(parts), index, parts))
    while len(heap) > 1:
        _, order, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [
            (a_sum + b_sum, a + b)
            for (a_sum, a), (b_sum, b) in zip(first, reversed(second), strict=True)
        ]
        merged.sort(key=lambda part: (-part[0], -len(part[1]), part[1]))
        heapq.heappush(heap, (_spread(merged), order, merged))
    return _without_empty([part for _, part in heap[0][2]], lengths)


def balanced_sizes(n: int, k: int) -> list[int]:
    """Sizes of ``k`` contiguous shares of ``n`` items that differ by at most one."""
    return [n // k + (i < n % k) for i in range(k)]


def _items(lengths: Sequence[int], groups: Sequence[int] | None) -> list[list[int]]:
    if groups is None:
        return [[row] for row in range(len(lengths))]
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    return list(members.values())


def _check_cap(
    items: Sequence[Sequence[int]], sizes: Sequence[int], cap: int, *, is_grouped: bool
) -> None:
    for item, size in zip(items, sizes, strict=True):
        if size > cap:
            what = f"rows {list(item)} (kept together)" if is_grouped else f"row {item[0]}"
            raise DataError(
                f"{what}: {size} tokens > {cap}, the cap of a micro-batch; "
                "raise max_tokens_per_microbatch or shorten the row"
            )


def _spread(parts: Sequence[tuple[int, list[int]]]) -> tuple[int, int]:
    """Heap key: the largest difference first (heapq pops the smallest)."""
    return (parts[-1][0] - parts[0][0], len(parts[-1][1]) - len(parts[0][1]))


def _without_empty(parts: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Give each empty part one item of the part that has the most, as long as one can spare it."""
    for part in parts:
        donor = max(parts, key=len)
        if not part and len(donor) > 1:
            lightest = min(donor, key=lambda i: (lengths[i], i))
            donor.remove(lightest)
            part.append(lightest)
    return parts


def _split_to(bins: list[list[int]], sizes: Sequence[int], count: int) -> list[list[int]]:
    """Halve the heaviest bins that have two items or more until there are ``count``."""
    bins = list(bins)
    while len(bins) < count:
        splittable = [part for part in bins if len(part) > 1]
        if not splittable:
            break
        heaviest = max(splittable, key=lambda part: sum(sizes[i] for i in part))
        bins.remove(heaviest)
        for half in karmarkar_karp([sizes[i] for i in heaviest], 2):
            bins.append([heaviest[i] for i in half])
    return bins
