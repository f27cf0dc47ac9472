import math

import pytest
import torch
from tensordict import TensorDict

from tandem.algorithms.advantages import ADVANTAGES, TOKEN_ADVANTAGES, assign_advantages
from tandem.algorithms.advantages.grpo import dr_grpo, grpo, grpo_loo
from tandem.algorithms.advantages.pass_at_k import grpo_passk
from tandem.algorithms.advantages.reinforce import reinforce
from tandem.algorithms.advantages.reinforce_plus_plus import (
    discounted_returns,
    reinforce_plus_plus_baseline,
)
from tandem.algorithms.advantages.reweighted import gpg, maxrl
from tandem.algorithms.advantages.rloo import rloo
from tandem.errors import ConfigError, DataError

NAN = float("nan")
RELATIVE = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "grpo_loo": grpo_loo,
    "grpo_passk": grpo_passk,
    "rloo": rloo,
    "gpg": gpg,
    "maxrl": maxrl,
}
relative = pytest.mark.parametrize("estimator", RELATIVE.values(), ids=RELATIVE)


def close(got, expected, atol=1e-6):
    torch.testing.assert_close(got.double(), torch.tensor(expected).double(), atol=atol, rtol=0)


def make_batch(rewards, group_ids, lengths=None, **extra):
    lengths = torch.tensor(lengths or [2] * len(rewards))
    width = int(lengths.max()) + 1
    position = torch.arange(width)
    data = {
        "rewards": torch.tensor(rewards),
        "group_ids": torch.tensor(group_ids),
        "loss_mask": (position > 0) & (position <= lengths[:, None]),
    }
    return TensorDict(data | extra, batch_size=[len(rewards)])


def test_groups_are_formed_by_id_and_may_be_uneven():
    close(
        dr_grpo(torch.tensor([1.0, 0, 1, 0, 0]), torch.tensor([4, 4, 4, 9, 9])),
        [1 / 3, -2 / 3, 1 / 3, 0, 0],
    )
    close(
        dr_grpo(torch.tensor([1.0, 0, 0, 1, 0]), torch.tensor([4, 9, 4, 4, 9])),
        [1 / 3, 0, -2 / 3, 1 / 3, 0],
    )


@relative
def test_a_group_of_one_gets_exactly_zero(estimator):
    out = estimator(torch.tensor([0.7, 1.0, 0.0]), torch.tensor([0, 1, 1]))
    assert out[0].item() == 0.0


@relative
@pytest.mark.parametrize("noise", [0.0, 1e-8])
def test_equal_rewards_get_exactly_zero_also_with_rounding(estimator, noise):
    rewards = torch.full((7,), 0.1) + noise * torch.arange(7)
    assert estimator(rewards, torch.zeros(7, dtype=torch.int64)).eq(0).all()


@relative
def test_a_missing_reward_is_left_out_of_the_statistics(estimator):
    ids = torch.zeros(4, dtype=torch.int64)
    with_nan = estimator(torch.tensor([1.0, NAN, 0.0, 0.5]), ids)
    without = estimator(torch.tensor([1.0, 0.0, 0.5]), ids[:3])
    assert with_nan[1].item() == 0.0
    torch.testing.assert_close(with_nan[[0, 2, 3]], without)


def test_nan_reward_does_not_poison_its_group():
    out = grpo(torch.tensor([1.0, NAN, 0, 0]), torch.zeros(4, dtype=torch.int64), eps=1e-4)
    close(out, [1.154501, 0, -0.577250, -0.577250])


def test_mean_of_the_others_is_the_rloo_baseline():
    r = [0.3, 0.9, 0.1]
    close(
        rloo(torch.tensor(r), torch.zeros(3, dtype=torch.int64)),
        [r[0] - (r[1] + r[2]) / 2, r[1] - (r[0] + r[2]) / 2, r[2] - (r[0] + r[1]) / 2],
    )


def test_leave_one_out_spread_does_not_blow_up_when_the_others_agree():
    for size in (2, 3, 64):
        rewards = torch.zeros(size)
        rewards[0] = 1.0
        out = grpo_loo(rewards, torch.zeros(size, dtype=torch.int64))
        assert out[0].item() == pytest.approx(1.0)


def test_batch_baseline_ignores_groups():
    out = reinforce(torch.tensor([1.0, 0, NAN, 2]), torch.tensor([0, 1, 1, 2]))
    close(out, [0, -1, 0, 1])
    raw = reinforce(torch.tensor([1.0, NAN]), torch.tensor([0, 0]), baseline="none")
    close(raw, [1, 0])


def test_gpg_counts_live_groups_as_the_paper_or_non_zero_rewards():
    rewards, ids = torch.tensor([1.0, 0, 1, 1]), torch.tensor([0, 0, 1, 1])
    close(gpg(rewards, ids), [1, -1, 0, 0])
    close(gpg(rewards, ids, live="rewards"), [2 / 3, -2 / 3, 0, 0])


def test_maxrl_refuses_negative_rewards():
    with pytest.raises(DataError, match=r"rewards: got -1\.0"):
        maxrl(torch.tensor([1.0, -1.0]), torch.tensor([0, 0]))


def test_tie_for_the_best_gives_no_pass_at_k_advantage():
    assert grpo_passk(torch.tensor([1.0, 1, 0]), torch.zeros(3, dtype=torch.int64)).eq(0).all()


def test_population_of_the_normalisation_is_selectable():
    rewards, ids = torch.tensor([1.0, -1.0]), torch.tensor([0, 0])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    tokens = reinforce_plus_plus_baseline(rewards, ids, mask, ddof=0)
    responses = reinforce_plus_plus_baseline(rewards, ids, mask, ddof=0, population="responses")
    spread = math.sqrt(0.75)
    close(tokens, [[0.5 / spread] * 3, [-1.5 / spread, 0, 0]])
    close(responses, [[1.0] * 3, [-1.0, 0, 0]])


def test_returns_flow_over_observation_tokens():
    returns = discounted_returns(torch.tensor([[0.0, 0, 1]]), torch.tensor([[1, 0, 1]]), gamma=0.5)
    close(returns, [[0.5, 0, 1]])


# --- assign_advantages ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted((ADVANTAGES | TOKEN_ADVANTAGES).keys() - {"none"}))
def test_every_estimator_writes_float32_under_the_mask_and_keeps_the_callers_batch(name):
    shape = (4, 3)
    batch = make_batch(
        [1.0, 0.0, 0.0, 1.0],
        [0, 0, 1, 1],
        [2, 1, 2, 2],
        values=torch.full(shape, 0.1),
        greedy_rewards=torch.zeros(4),
        reward_parts=torch.tensor([[1.0, 0], [0, 0], [0, 1], [1, 1]]),
        prox_logprobs=torch.full(shape, -1.0),
        teacher_logprobs=torch.full(shape, -2.0),
    )
    before = batch.clone()
    out, _ = assign_advantages(batch, name)
    assert out["advantages"].shape == shape
    assert out["advantages"].dtype == torch.float32
    assert out["advantages"][~batch["loss_mask"]].eq(0).all()
    assert out["advantages"].abs().sum() > 0
    assert "advantages" not in batch
    assert set(batch.keys()) == set(before.keys())
    assert all(batch[key].equal(before[key]) for key in set(before.keys()))


def test_rows_of_one_trajectory_count_once_in_the_group():
    batch = make_batch([1.0, 1.0, 0.0, 0.0], [0, 0, 0, 0], sample_ids=torch.tensor([5, 5, 6, 7]))
    out, _ = assign_advantages(batch, "dr_grpo")
    close(out["advantages"][:, 1], [2 / 3, 2 / 3, -1 / 3, -1 / 3])
    plain, _ = assign_advantages(batch.exclude("sample_ids"), "dr_grpo")
    close(plain["advantages"][:, 1], [0.5, 0.5, -0.5, -0.5])


def test_rows_of_one_trajectory_must_agree():
    batch = make_batch([1.0, 0.0], [0, 0], sample_ids=torch.tensor([5, 5]))
    with pytest.raises(DataError, match="rewards: rows with the same sample_ids differ"):
        assign_advantages(batch, "grpo")


def test_opo_counts_the_length_over_all_rows_of_a_trajectory():
    split = make_batch([1.0, 1.0, 0.0], [0, 0, 0], [2, 1, 2], sample_ids=torch.tensor([5, 5, 6]))
    whole = make_batch([1.0, 0.0], [0, 0], [3, 2])
    out, _ = assign_advantages(split, "opo")
    expected, _ = assign_advantages(whole, "opo")
    close(out["advantages"][[0, 2], 1], expected["advantages"][:, 1].tolist())
    assert out["advantages"][0, 1].item() == pytest.approx(0.4)


def test_fraction_of_groups_without_signal_is_exact():
    _, metrics = assign_advantages(make_batch([1.0, 1, 1, 0], [0, 0, 1, 1]), "dr_grpo")
    assert metrics == {"frac_reward_zero_std": 0.5, "rewards_missing": 0.0}
    _, metrics = assign_advantages(
        make_batch([1.0, NAN, 1, 0, NAN, NAN], [0, 0, 1, 1, 2, 2]), "grpo"
    )
    assert metrics == {"frac_reward_zero_std": 0.5, "rewards_missing": 3.0}


def test_unknown_estimator_and_missing_keys_are_named():
    batch = make_batch([1.0, 0.0], [0, 0])
    with pytest.raises(ConfigError, match=r"algorithm\.advantage: got 'grop', allowed: grpo"):
        assign_advantages(batch, "grop")
    with pytest.raises(DataError, match="group_ids: missing from the batch, required by grpo"):
        assign_advantages(batch.exclude("group_ids"), "grpo")
    with pytest.raises(DataError, match="greedy_rewards: missing"):
        assign_advantages(batch, "remax")
    with pytest.raises(DataError, match="values: missing"):
        assign_advantages(batch, "gae")
    split = make_batch([1.0, 1.0], [0, 0], sample_ids=torch.tensor([5, 5]))
    with pytest.raises(DataError, match=r"sample_ids: reinforce\+\+ needs every trajectory"):
        assign_advantages(split, "reinforce++")
