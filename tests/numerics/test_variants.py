"""The same kinds of cases with other parameters, against loops over plain numbers."""

from __future__ import annotations

import math
import random
import statistics

import pytest
import torch

from tandem.algorithms.advantages.gdpo import gdpo
from tandem.algorithms.advantages.grpo import grpo
from tandem.algorithms.aggregation import loss_weights
from tandem.algorithms.policy import POLICY_LOSSES
from tandem.algorithms.tokens import logprobs_and_entropy

GROUPS = [0, 0, 0, 1, 2, 2, 2, 2, 3, 3]


def rewards_of(seed: int) -> list[float]:
    draw = random.Random(seed)
    return [draw.uniform(-2, 2) for _ in GROUPS]


def by_hand(rewards: list[float], ddof: int, eps: float) -> list[float]:
    found = []
    for reward, group in zip(rewards, GROUPS, strict=True):
        members = [r for r, g in zip(rewards, GROUPS, strict=True) if g == group]
        spread = statistics.stdev if ddof else statistics.pstdev
        is_alone = len(members) == 1
        found.append(
            0.0 if is_alone else (reward - statistics.mean(members)) / (spread(members) + eps)
        )
    return found


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_grpo_of_uneven_groups(ddof: int, eps: float) -> None:
    rewards = rewards_of(ddof)
    found = grpo(torch.tensor(rewards).double(), torch.tensor(GROUPS), ddof=ddof, eps=eps)
    assert found.tolist() == pytest.approx(by_hand(rewards, ddof, eps), rel=1e-6)


def test_gdpo_with_uneven_weights_before_the_last_normalisation() -> None:
    parts = [rewards_of(1), rewards_of(2)]
    found = gdpo(
        torch.tensor(parts).double().sum(0),
        torch.tensor(GROUPS),
        reward_parts=torch.tensor(parts).double().T,
        weights=[1.0, -0.3],
        ddof=0,
        normalise_batch=False,
    )
    first, second = (by_hand(part, 0, 1e-6) for part in parts)
    assert found.tolist() == pytest.approx(
        [a - 0.3 * b for a, b in zip(first, second, strict=True)], rel=1e-6
    )


@pytest.mark.parametrize(
    ("low", "high", "dual"), [(0.2, 0.2, 3.0), (0.1, 0.5, 1.5), (0.3, 0.28, None)]
)
def test_clips_on_both_signs_of_the_advantage(low: float, high: float, dual: float | None) -> None:
    draw = random.Random(4)
    logs = [draw.uniform(-2, 2) for _ in range(40)]
    advantages = [draw.uniform(-2, 2) for _ in range(40)]
    expected = []
    for log_ratio, advantage in zip(logs, advantages, strict=True):
        ratio = math.exp(log_ratio)
        bounded = min(max(ratio, 1 - low), 1 + high)
        loss = -min(ratio * advantage, bounded * advantage)
        if dual is not None and advantage < 0:
            loss = min(loss, -dual * advantage)
        expected.append(loss)
    ones = torch.ones(1, 40, dtype=torch.bool)
    kwargs = {"clip_low": low, "clip_high": high} | ({"dual_clip": dual} if dual else {})
    found, _ = POLICY_LOSSES["ppo_clip"](
        torch.tensor([logs]).double(),
        torch.zeros(1, 40).double(),
        torch.tensor([advantages]).double(),
        ones,
        **kwargs,
    )
    assert found[0].tolist() == pytest.approx(expected, rel=1e-6)


def test_aggregations_with_an_empty_row_and_a_split_trajectory() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [0, 1, 1, 1], [0, 0, 0, 1]]).bool()
    sample_ids = torch.tensor([5, 6, 7, 7])
    losses = torch.arange(16.0).double().reshape(4, 4)
    # Trajectory 5: 1 + 2; trajectory 7: 9 + 10 + 11 and 15. Trajectory 6 has no trained token.
    expected = {
        "token-mean": (3 + 45) / 6,
        "token-sum": 48,
        "seq-mean-token-sum": (3 + 45) / 2,
        "seq-mean-token-mean": (3 / 2 + 45 / 4) / 2,
        "seq-mean-token-sum-norm": (3 + 45) / 5 / 2,
    }
    for mode, value in expected.items():
        weights = loss_weights(mode, mask, sample_ids=sample_ids, horizon=5, dtype=torch.float64)
        assert float((weights * losses).sum()) == pytest.approx(value), mode


@pytest.mark.parametrize("temperature", [0.3, 1.7])
def test_logprobs_and_entropy_at_other_temperatures(temperature: float) -> None:
    logits = [[1.0, -2.0, 0.5], [3.0, 3.0, -1.0]]
    found = logprobs_and_entropy(
        torch.tensor(logits).double(), torch.tensor([2, 0]), temperature=temperature
    )
    for row, label, logprob, entropy in zip(
        logits, [2, 0], found[0].tolist(), found[1].tolist(), strict=True
    ):
        weights = [math.exp(value / temperature) for value in row]
        shares = [weight / sum(weights) for weight in weights]
        assert logprob == pytest.approx(math.log(shares[label]), rel=1e-6)
        assert entropy == pytest.approx(-sum(p * math.log(p) for p in shares), rel=1e-6)
