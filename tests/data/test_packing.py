import random

import pytest
import torch

from tandem.data.packing import (
    balanced_sizes,
    cut_microbatches,
    first_fit_decreasing,
    karmarkar_karp,
    pack,
)
from tandem.errors import DataError


def sums(parts, lengths):
    return sorted((sum(lengths[i] for i in part) for part in parts), reverse=True)


# --- the next-token shift -------------------------------------------------------------------------


def test_packed_rows_and_the_tokens_they_predict():
    ids = torch.tensor([[3, 4, 5, 0], [6, 7, 8, 9]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).bool()
    packed = pack(ids, mask)
    assert packed.input_ids.tolist() == [[3, 4, 5, 6, 7, 8, 9]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert packed.lengths == (3, 4)
    # Hidden state 0 (token 3) predicts token 4, and so on; the last of a row predicts nothing.
    assert packed.sources.tolist() == [0, 1, 3, 4, 5]
    assert packed.targets.tolist() == [4, 5, 7, 8, 9]
    dense = packed.unpack(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert dense.tolist() == [[0, 1, 2, 0], [0, 3, 4, 5]]


def test_left_padding_gives_the_same_pack_and_its_own_slots():
    ids = torch.tensor([[0, 0, 3, 4, 5]])
    packed = pack(ids, torch.tensor([[0, 0, 1, 1, 1]]).bool())
    assert packed.position_ids.tolist() == [[0, 1, 2]]
    assert packed.unpack(torch.tensor([1.0, 2.0])).tolist() == [[0, 0, 0, 1, 2]]


def test_only_wanted_tokens_are_predicted():
    ids = torch.tensor([[11, 12, 21, 22, 2]])
    wanted = torch.tensor([[0, 0, 1, 1, 1]]).bool()
    packed = pack(ids, torch.ones(1, 5).bool(), predict_BT=wanted)
    assert packed.sources.tolist() == [1, 2, 3]
    assert packed.targets.tolist() == [21, 22, 2]


def test_the_first_token_is_never_predicted():
    packed = pack(torch.tensor([[5]]), torch.ones(1, 1).bool(), predict_BT=torch.ones(1, 1).bool())
    assert packed.sources.tolist() == []


def test_given_position_ids_are_used():
    packed = pack(
        torch.tensor([[3, 4, 0]]),
        torch.tensor([[1, 1, 0]]).bool(),
        position_ids_BT=torch.tensor([[7, 8, 0]]),
    )
    assert packed.position_ids.tolist() == [[7, 8]]


def test_slices_of_a_pack_keep_positions_targets_and_places():
    ids = torch.tensor([[3, 4, 5, 0], [6, 7, 8, 9]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).bool()
    first, second = (pack(ids, mask).part(number, 2) for number in (0, 1))
    assert first.input_ids.tolist() == [[3, 4, 5, 6]]
    assert second.input_ids.tolist() == [[7, 8, 9, 0]]
    assert (first.lengths, second.lengths) == ((3, 4, 1), (3, 4, 1))
    # The second row goes on at position 1, and its token 7 is predicted by the slice before.
    assert first.position_ids.tolist() == [[0, 1, 2, 0]]
    assert second.position_ids.tolist() == [[1, 2, 3, 0]]
    assert (first.sources.tolist(), first.targets.tolist()) == ([0, 1, 3], [4, 5, 7])
    assert (second.sources.tolist(), second.targets.tolist()) == ([0, 1], [8, 9])
    dense = first.unpack(torch.tensor([1.0, 2.0, 3.0])), second.unpack(torch.tensor([4.0, 5.0]))
    assert [d.tolist() for d in dense] == [
        [[0, 1, 2, 0], [0, 3, 0, 0]],
        [[0, 0, 0, 0], [0, 0, 4, 5]],
    ]
    lasts = [part.last_of_rows(10.0 + torch.arange(4)) for part in (first, second)]
    assert [last.tolist() for last in lasts] == [[12, 0], [0, 12]]


def test_slices_may_be_nothing_but_filler():
    parts = [pack(torch.tensor([[5]]), torch.ones(1, 1).bool()).part(n, 3) for n in range(3)]
    assert [part.input_ids.tolist() for part in parts] == [[[5]], [[0]], [[0]]]
    assert {part.lengths for part in parts} == {(1, 2)}
    assert [part.lasts.tolist() for part in parts] == [[0], [], []]


# --- partitions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "k", "expected"),
    [
        ([8, 7, 6, 5, 4], 2, [16, 14]),
        ([100, 1, 1, 1, 1, 1], 2, [100, 5]),
        ([5, 5, 5, 5, 5, 5], 4, [10, 10, 5, 5]),
        ([0, 0, 0], 3, [0, 0, 0]),
    ],
)
def test_karmarkar_karp(lengths, k, expected):
    parts = karmarkar_karp(lengths, k)
    assert sums(parts, lengths) == expected
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert all(parts)


@pytest.mark.parametrize(
    ("lengths", "loads"), [([6, 6, 6], [6, 6, 6]), ([9, 8, 2, 2, 5, 4], [10, 9, 9, 2])]
)
def test_first_fit_decreasing(lengths, loads):
    assert sums(first_fit_decreasing(lengths, 10), lengths) == loads


def test_balanced_sizes():
    assert balanced_sizes(9, 4) == [3, 2, 2, 2]


def test_a_row_over_the_cap_is_named():
    with pytest.raises(DataError, match="row 0: 12 tokens > 10"):
        cut_microbatches([12, 3], max_tokens=10)


def test_every_cut_keeps_the_caps_and_every_row():
    rng = random.Random(0)
    for _ in range(200):
        lengths = [rng.randint(1, 20) for _ in range(rng.randint(1, 30))]
        cap, rows = rng.randint(20, 60), rng.choice([None, 1, 3])
        cut = cut_microbatches(lengths, max_tokens=cap, max_items=rows)
        assert sorted(i for part in cut for i in part) == list(range(len(lengths)))
        assert all(part for part in cut)
        assert all(sum(lengths[i] for i in part) <= cap for part in cut)
        assert all(rows is None or len(part) <= rows for part in cut)
        assert cut == cut_microbatches(lengths, max_tokens=cap, max_items=rows)


def test_groups_stay_together():
    groups = [7, 8, 7, 8, 9, 9]
    cut = cut_microbatches([4, 4, 4, 4, 1, 1], max_tokens=10, groups=groups)
    for part in cut:
        assert all({i for i in range(6) if groups[i] == groups[row]} <= set(part) for row in part)
    by_count = cut_microbatches([1] * 6, max_tokens=100, max_items=1, groups=groups)
    assert by_count == [[0, 2], [1, 3], [4, 5]]
    with pytest.raises(DataError, match=r"rows \[0, 2\] \(kept together\): 8 tokens > 7"):
        cut_microbatches([4, 1, 4, 1, 1, 1], max_tokens=7, groups=groups)


def test_ranks_agree_on_a_count_without_empty_bins():
    lengths = {0: [10, 10, 1], 1: [10, 10, 10]}
    own = {r: len(cut_microbatches(n, max_tokens=10)) for r, n in lengths.items()}
    agreed = max(own.values())
    cuts = [cut_microbatches(lengths[r], max_tokens=10, agree=lambda _: agreed) for r in (0, 1)]
    assert [[lengths[0][i] for i in part] for part in cuts[0]] == [[10], [10], [1]]
    assert len(cuts[1]) == 3


def test_a_rank_with_enough_rows_splits_and_one_without_runs_dummies():
    cut = cut_microbatches([2, 2, 2, 2], max_tokens=10, agree=lambda _: 3)
    assert sorted(len(part) for part in cut) == [1, 1, 2]
    assert cut_microbatches([2, 2], max_tokens=10, agree=lambda _: 4) == [[0], [1], [], []]
