import pytest
import torch
from tensordict import TensorDict

from tandem.algorithms.advantages import assign_advantages
from tandem.algorithms.advantages.gae import gae
from tandem.algorithms.shaping import rewards_on_trained_tokens, score_on_last_token
from tandem.errors import ConfigError, DataError

NAN = float("nan")


def close(got, expected):
    torch.testing.assert_close(got, torch.tensor(expected), atol=1e-6, rtol=0)


def test_observation_tokens_are_no_time_steps():
    advantages, _ = gae(
        torch.tensor([[0.0, 0, 0, 2]]),
        torch.tensor([[0.5, 0.1, 9, 0.4]]),
        torch.tensor([[1, 0, 0, 1]]),
        gamma=0.5,
        lam=0.5,
    )
    close(advantages, [[0.1, 0, 0, 1.6]])


def test_truncated_rows_bootstrap_and_ended_rows_do_not():
    values = torch.tensor([[0.2, 0.6], [0.2, 0.6]])
    advantages, returns = gae(
        torch.zeros(2, 2), values, torch.ones(2, 2), bootstrap_values_B=torch.tensor([0.5, 0.0])
    )
    close(advantages, [[0.3, -0.1], [-0.2, -0.6]])
    close(returns, [[0.5, 0.5], [0.0, 0.0]])


def test_junk_outside_the_mask_changes_nothing():
    mask = torch.tensor([[0, 1, 1, 0]])
    clean = gae(torch.tensor([[0.0, 0, 1, 0]]), torch.tensor([[0.0, 0.3, 0.4, 0]]), mask)
    junk = gae(torch.tensor([[NAN, 0, 1, NAN]]), torch.tensor([[NAN, 0.3, 0.4, NAN]]), mask)
    for a, b in zip(clean, junk, strict=True):
        torch.testing.assert_close(a, b)


def test_reward_on_an_observation_belongs_to_the_action_before_it():
    rewards = torch.tensor([[5.0, 0, 1, 2, 0, 4]])
    mask = torch.tensor([[0, 1, 0, 0, 1, 0]])
    close(rewards_on_trained_tokens(rewards, mask), [[0.0, 3, 0, 0, 4, 0]])


def test_score_sits_on_the_last_trained_token():
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0]])
    close(score_on_last_token(torch.tensor([1.0, 7.0]), mask), [[0.0, 0, 0, 1, 0], [0.0] * 5])
    with pytest.raises(DataError, match="scores: got shape"):
        score_on_last_token(torch.ones(3), mask)


def test_batch_keys_reach_the_estimator():
    batch = TensorDict(
        {
            "loss_mask": torch.tensor([[0, 1, 1]]).bool(),
            "rewards": torch.tensor([1.0]),
            "values": torch.tensor([[0.0, 0.2, 0.6]]),
            "bootstrap_values": torch.tensor([0.5]),
        },
        batch_size=[1],
    )
    out, metrics = assign_advantages(batch, "gae", whiten=False)
    close(out["advantages"], [[0.0, 1.3, 0.9]])
    close(out["returns"], [[0.0, 1.5, 1.5]])
    assert metrics == {}


def test_overlong_penalty_needs_a_cache_inside_the_limit():
    from tandem.algorithms.shaping import overlong_penalty

    with pytest.raises(ConfigError, match="cache: got 30"):
        overlong_penalty(torch.tensor([1]), max_length=20, cache=30)
