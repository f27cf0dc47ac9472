"""Visiting order and position: resumes are exact, also at the border of two epochs."""

from __future__ import annotations

import pytest

from tandem.data.order import ShuffledOrder
from tandem.errors import DataError


def order(length: int = 6, seed: int = 123, shuffle: bool = True) -> ShuffledOrder:
    return ShuffledOrder(length, seed=(seed,), shuffle=shuffle)


def epoch_rows(source: ShuffledOrder, epoch: int) -> list[int]:
    return [source.row(epoch, position) for position in range(len(source))]


def test_every_epoch_visits_every_row_once_in_an_order_of_its_own() -> None:
    source = order(100)
    first, second = epoch_rows(source, 0), epoch_rows(source, 1)
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second
    assert first != list(range(100))


def test_order_depends_on_the_seed_and_repeats_for_the_same_seed() -> None:
    assert epoch_rows(order(50, seed=1), 3) == epoch_rows(order(50, seed=1), 3)
    assert epoch_rows(order(50, seed=1), 3) != epoch_rows(order(50, seed=2), 3)


def test_order_of_a_seed_never_changes_between_releases() -> None:
    assert [epoch_rows(order(), epoch) for epoch in (0, 1)] == [
        [2, 4, 5, 3, 0, 1],
        [1, 3, 0, 2, 4, 5],
    ]


def test_without_shuffle_the_rows_come_in_file_order() -> None:
    assert epoch_rows(order(shuffle=False), 4) == [0, 1, 2, 3, 4, 5]


def test_resume_at_an_epoch_border_uses_all_rows_of_the_next_epoch_once() -> None:
    whole = list(order().batches(2, epochs=2))
    source = order()
    batches = source.batches(2, epochs=2)
    before = [next(batches) for _ in range(3)]
    resumed = order()
    resumed.load_state_dict(source.state_dict())
    after = list(resumed.batches(2, epochs=2))
    assert before + after == whole
    assert len(after) == 3
    assert {resumed.row(*address) for batch in after for address in batch} == set(range(6))


def test_resume_after_one_epoch_gives_the_second_order_not_the_first_again() -> None:
    source = order()
    for _ in range(6):
        source.advance()
    resumed = order()
    resumed.load_state_dict(source.state_dict())
    rows = [resumed.row(*resumed.advance()) for _ in range(6)]
    assert rows == epoch_rows(order(), 1)
    assert rows != epoch_rows(order(), 0)


def test_state_speaks_of_the_next_batch_once_one_is_handed_out() -> None:
    source = order(10)
    batches = source.batches(1)
    for _ in range(3):
        next(batches)
    assert source.address == (0, 3)


def test_last_batch_of_an_epoch_is_smaller_and_never_crosses_it() -> None:
    batches = list(order(5).batches(2, epochs=2))
    assert [len(batch) for batch in batches] == [2, 2, 1, 2, 2, 1]
    assert {epoch for epoch, _ in batches[2]} == {0}


@pytest.mark.parametrize("change", [{"length": 7}, {"seed": 1}, {"shuffle": False}])
def test_position_of_other_data_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(DataError, match=next(iter(change))):
        order(**change).load_state_dict(order().state_dict())


def test_malformed_position_is_refused() -> None:
    state = order().state_dict()
    with pytest.raises(DataError, match="outside"):
        order().load_state_dict({**state, "position": 6})
    with pytest.raises(DataError, match="keys"):
        order().load_state_dict({"epoch": 0})


@pytest.mark.parametrize("address", [(0, 6), (0, -1), (-1, 0)])
def test_address_outside_the_epoch_is_an_error(address: tuple[int, int]) -> None:
    with pytest.raises(IndexError):
        order().row(*address)
