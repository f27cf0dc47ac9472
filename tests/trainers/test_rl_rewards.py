"""Rewards between rollout and advantages, without models."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict

from tandem.algorithms.advantages import assign_advantages
from tandem.config import AlgorithmConfig
from tandem.trainers.rl_rewards import add_scores, penalise_divergence, shape_rewards
from tests.trainers.test_rl_batch import make_batch

NAN = math.nan


class Scorer:
    """A reward-model engine that knows the scores."""

    def __init__(self, scores: list[float]) -> None:
        self._scores = torch.tensor(scores)

    def eval_mode(self) -> Scorer:
        return self

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None: ...

    def forward(self, batch: TensorDict, *, outputs: tuple[str, ...]) -> dict[str, torch.Tensor]:
        assert outputs == ("scores",)
        return {"scores": self._scores}


def rewards_of(batch: TensorDict, **shaping: float) -> list[float]:
    shape_rewards(batch, AlgorithmConfig(shaping=shaping), max_new_tokens=10)
    return batch["rewards"].tolist()


def test_scores_are_added_by_weight_and_missing_rewards_stay_missing():
    batch = make_batch([1, 2, 3], [0, 0, 0])
    batch["rewards"] = torch.tensor([1.0, NAN, 0.0])
    metrics = add_scores(batch, Scorer([0.5, 0.5, -2.0]), weight=2.0)
    torch.testing.assert_close(batch["rewards"], torch.tensor([2.0, NAN, -4.0]), equal_nan=True)
    assert metrics["reward/model_mean"] == pytest.approx(-1 / 3)
    assert metrics["reward/rollout_mean"] == 0.5


def test_a_trajectory_of_several_rows_has_the_score_of_its_last_row():
    batch = make_batch([1, 2, 3], [0, 0, 0])
    batch["sample_ids"] = torch.tensor([4, 2, 4])
    batch["rewards"] = torch.zeros(3)
    add_scores(batch, Scorer([1.0, 2.0, 3.0]), weight=1.0)
    assert batch["rewards"].tolist() == [3.0, 2.0, 3.0]


def test_nothing_configured_changes_nothing():
    batch = make_batch([1, 2], [0, 0])
    before = batch.clone()
    assert shape_rewards(batch, AlgorithmConfig(), max_new_tokens=10) == {}
    assert torch.equal(batch["rewards"], before["rewards"])
    assert torch.equal(batch["loss_mask"], before["loss_mask"])


def test_truncated_samples_get_the_reward_that_is_configured_unless_they_have_none():
    batch = make_batch([1, 2, 3], [0, 0, 0])
    batch["rewards"] = torch.tensor([1.0, NAN, 1.0])
    batch["truncated"] = torch.tensor([True, True, False])
    found = rewards_of(batch, truncated_reward=-0.5)
    assert found[0] == -0.5
    assert math.isnan(found[1])
    assert found[2] == 1.0


def test_the_overlong_penalty_grows_over_the_cache_before_the_limit():
    # Limit 10, cache 4: nothing up to 6 tokens, then a quarter of the factor a token.
    batch = make_batch([6, 7, 10], [0, 0, 0], num_columns=11)
    batch["rewards"] = torch.ones(3)
    assert rewards_of(batch, overlong_cache=4, overlong_factor=2.0) == [1.0, 0.5, -1.0]


def test_samples_outside_the_lengths_leave_statistics_and_loss_and_groups_become_uneven():
    batch = make_batch([1, 2, 3, 4, 2, 2], [0, 0, 0, 0, 1, 1])
    batch["rewards"] = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0])
    batch["group_ids"] = batch["episode_ids"]
    config = AlgorithmConfig(shaping={"min_tokens": 2, "max_tokens": 3})
    metrics = shape_rewards(batch, config, max_new_tokens=10)
    assert metrics["reward/filtered_fraction"] == pytest.approx(1 / 3)
    assert batch["loss_mask"].any(1).tolist() == [False, True, True, False, True, True]
    out, found = assign_advantages(batch, "dr_grpo")
    # The first group is down to two: 1 and 0 about their own mean.
    assert out["advantages"].amax(1).tolist() == [0.0, 0.5, 0.0, 0.0, 0.5, 0.0]
    assert out["advantages"].amin(1).tolist() == [0.0, 0.0, -0.5, 0.0, 0.0, -0.5]
    assert found["rewards_missing"] == 2


def test_the_length_of_a_trajectory_counts_all_its_rows():
    batch = make_batch([2, 2, 2], [0, 0, 0])
    batch["sample_ids"] = torch.tensor([5, 5, 6])
    shape_rewards(batch, AlgorithmConfig(shaping={"max_tokens": 3}), max_new_tokens=10)
    assert batch["loss_mask"].any(1).tolist() == [False, False, True]


def test_truncated_samples_can_be_left_out_of_the_loss_and_stay_in_the_statistics():
    batch = make_batch([1, 2], [0, 0])
    batch["truncated"] = torch.tensor([True, False])
    shape_rewards(batch, AlgorithmConfig(mask_truncated=True), max_new_tokens=10)
    assert batch["loss_mask"].any(1).tolist() == [False, True]
    assert not batch["rewards"].isnan().any()


def divergent_batch() -> TensorDict:
    """Log-ratios 0.5 and -1 in the first row, 2 in the second; padding is junk."""
    batch = make_batch([2, 1], [0, 1], num_columns=4)
    batch["rewards"] = torch.tensor([1.0, NAN])
    batch["prox_logprobs"] = torch.tensor([[NAN, -1.0, -2.0, NAN], [NAN, -1.0, NAN, NAN]])
    batch["ref_logprobs"] = torch.tensor([[NAN, -1.5, -1.0, NAN], [NAN, -3.0, NAN, NAN]])
    return batch


def test_divergence_is_taken_off_token_by_token_and_as_a_sum():
    batch = divergent_batch()
    mean, metrics = penalise_divergence(batch, 0.1, "k1")
    assert mean == pytest.approx((0.5 - 1.0 + 2.0) / 2)
    assert metrics["reward/kl_penalty"] == pytest.approx(0.1 * mean)
    expected = torch.tensor([[0.0, -0.05, 0.1 + 1.0, 0.0], [0.0, -0.2, 0.0, 0.0]])
    torch.testing.assert_close(batch["token_rewards"], expected)
    torch.testing.assert_close(batch["rewards"], torch.tensor([1.05, NAN]), equal_nan=True)


def test_the_sum_of_the_token_rewards_is_the_reward_of_the_row():
    batch = divergent_batch()
    batch["rewards"] = torch.tensor([1.0, -1.0])
    penalise_divergence(batch, 0.3, "k3")
    torch.testing.assert_close(batch["token_rewards"].sum(1), batch["rewards"])
