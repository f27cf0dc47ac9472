"""The running limit of ``pace``, its masks, and the bias of lengths."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from tandem.rollout.meters import LengthBias
from tandem.rollout.pacing import HoldBudget, Pacer
from tandem.rollout.rows import check_rows, join_rows
from tandem.rollout.staleness import StalenessLedger


def test_the_limit_falls_while_episodes_are_left_and_grows_when_a_batch_was_waited_for() -> None:
    pacer = Pacer(100, batch_size=8)
    assert pacer.limit == 100
    pacer.served(left_ready=3)
    assert pacer.limit == 97
    pacer.served(left_ready=2)
    assert pacer.limit == 97
    pacer.served(left_ready=8)
    assert pacer.limit == 82
    pacer.starved()
    pacer.served(left_ready=8)
    assert pacer.limit == 91
    pacer.served(left_ready=3)
    assert pacer.limit == 88


def test_the_limit_stays_between_one_and_what_may_run() -> None:
    pacer = Pacer(4, batch_size=1)
    for _ in range(100):
        pacer.served(left_ready=1)
    assert pacer.limit == 1
    for _ in range(100):
        pacer.starved()
        pacer.served(left_ready=0)
    assert pacer.limit == 4


def test_a_paced_ledger_starts_fewer_once_ready_episodes_are_left() -> None:
    book = StalenessLedger(max_concurrent=10, max_staleness=4, batch_size=4, stale_policy="pace")
    for key in range(10):
        book.submit(key)
        book.start(key, 0)
        book.finish(key, 0, 0)
    assert book.capacity() == 10
    book.hand_over(book.select(4, 0) or [])
    # Six are left of a batch of four: 10 * 0.85 may run, and none does.
    assert book.max_running == 8
    assert book.capacity() == 8


def test_a_paced_ledger_gives_no_episode_up_for_a_few_old_tokens() -> None:
    book = StalenessLedger(max_concurrent=9, max_staleness=1, batch_size=2, stale_policy="pace")
    for key, oldest, newest in ((1, 0, 3), (2, 3, 5)):
        book.submit(key)
        book.start(key, 0)
        book.finish(key, oldest, newest)
    assert book.expired(5) == [1]


def rows(versions: list[list[int]]) -> TensorDict:
    made = torch.tensor(versions)
    return TensorDict(
        {
            "input_ids": torch.ones_like(made),
            "attention_mask": torch.ones(made.shape, dtype=torch.bool),
            "loss_mask": made >= 0,
            "logprobs": torch.zeros(made.shape),
            "versions": made,
            "rewards": torch.ones(len(made)),
        },
        batch_size=[len(made)],
    )


def test_the_bias_is_that_of_token_weighted_mean_lengths() -> None:
    # Lengths 4 and 1; two tokens of the long one are too old.
    checked, facts = check_rows(rows([[-1, 0, 0, 5, 5], [-1, 5, -1, -1, -1]]), 0, 0)
    _, staleness = join_rows([checked], version=5, max_staleness=1)
    bias = LengthBias()
    assert bias.bias is None
    bias.made(facts)
    bias.handed_over(staleness)
    # All: (4 * 4 + 1 * 1) / 5. Trained: (2 * 4 + 1 * 1) / 3.
    assert bias.bias == pytest.approx((9 / 3) / (17 / 5) - 1)


def test_without_old_tokens_there_is_no_bias() -> None:
    checked, facts = check_rows(rows([[-1, 0, 0, 0, 0], [-1, 0, -1, -1, -1]]), 0, 0)
    _, staleness = join_rows([checked], version=1, max_staleness=1)
    bias = LengthBias()
    bias.made(facts)
    bias.handed_over(staleness)
    assert bias.bias == pytest.approx(0.0)


def test_what_was_made_long_ago_counts_less_and_less() -> None:
    bias = LengthBias()
    _, old = check_rows(rows([[-1, 0, 0, 0, 0]]), 0, 0)
    _, new = check_rows(rows([[-1, 0, -1, -1, -1]]), 1, 0)
    bias.made(old)
    for _ in range(1_000):
        checked, _ = check_rows(rows([[-1, 0, -1, -1, -1]]), 1, 0)
        bias.made(new)
        bias.handed_over(join_rows([checked], version=0)[1])
    assert bias.bias == pytest.approx(0.0, abs=0.01)


def test_a_hold_is_paid_from_the_share_of_time_that_was_saved_up() -> None:
    budget = HoldBudget()
    budget.handed_over(0.0)
    assert not budget.may_hold(0.0)
    budget.handed_over(100.0)
    # Six per cent of 100 s.
    assert budget.may_hold(110.0)
    assert budget.hold(110.0) == pytest.approx(116.0)
    assert budget.may_hold(115.9)
    assert not budget.may_hold(budget.hold(112.0))
    budget.handed_over(114.0)
    # 4 of 6 s are spent; the 14 s since the last batch add 0.84 s.
    assert budget.left_s == pytest.approx(6.0 - 4.0 + 0.84)


def test_no_more_than_half_a_step_is_saved_up() -> None:
    budget = HoldBudget()
    for now in range(100):
        budget.handed_over(float(now))
    assert budget.left_s == pytest.approx(0.5)


def test_what_gets_ready_while_a_batch_is_held_does_not_lower_the_limit() -> None:
    pacer = Pacer(100, batch_size=8)
    pacer.held()
    pacer.served(left_ready=20)
    assert pacer.limit == 100
    pacer.served(left_ready=3)
    assert pacer.limit == 97
