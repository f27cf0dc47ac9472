"""What the learner asks its engines and in which order, with engines that know the answers."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tandem.config import AlgorithmConfig, load_config
from tandem.trainers.rl_batch import build_objective, is_single_step, minibatches
from tandem.trainers.rl_critic import Critic
from tandem.trainers.rl_learner import Learner, likeliest
from tests.trainers.test_rl_batch import make_batch


class Known:
    """An engine whose outputs are given; it records the optimizer steps that are asked of it."""

    def __init__(self, version: int = 0, **outputs: torch.Tensor) -> None:
        self._outputs, self._version = outputs, version
        self.steps: list[TensorDict] = []

    @contextmanager
    def eval_mode(self) -> Any:
        yield self

    train_mode = eval_mode

    def get_version(self) -> int:
        return self._version

    def forward(self, batch: TensorDict, *, outputs: Any, trained_only: bool) -> Any:
        assert trained_only
        return {name: self._outputs[name] for name in outputs}

    def train_batch(self, batch: TensorDict, loss_fn: Any) -> dict[str, float]:
        self.steps.append(batch)
        return {"loss": float(len(self.steps)), "critic/vf_clipfrac": 0.5}

    def lr_scheduler_step(self) -> float:
        return 0.0


def config_of(*overrides: str) -> Any:
    base = {"kind": "rl", "model": {"path": "m"}, "data": {"source": "jsonl", "path": "p"}}
    return load_config(base, overrides)


def rows() -> TensorDict:
    batch = make_batch([2, 2], [0, 1], num_columns=4)
    batch["rewards"] = torch.tensor([1.0, 0.0])
    batch["group_ids"] = batch["episode_ids"]
    batch["truncated"] = torch.tensor([False, True])
    return batch.exclude("prox_logprobs", "advantages")


VALUES = torch.tensor([[9.0, 0.5, 0.75, 9.0], [9.0, 0.2, 0.6, 9.0]])
GAE = ("algorithm.advantage=gae", "algorithm.advantage_kwargs={whiten: false}")


def learner_with_critic(*overrides: str, version: int = 0) -> Learner:
    config = config_of(*GAE, "critic={}", *overrides)
    engine = Known(values=VALUES, bootstrap_values=torch.tensor([7.0, 0.4]))
    policy = Known(version, train_logprobs=torch.zeros(2, 4))
    return Learner(config, policy, critic=Critic(config.critic, engine))  # type: ignore[arg-type]


def test_only_truncated_rows_go_on_with_the_value_of_their_last_state():
    batch, _ = learner_with_critic().prepare(rows())
    # Gamma and lambda 1: the return is the reward, or the value after the cut.
    torch.testing.assert_close(batch["returns"][:, 1:3], torch.tensor([[1.0, 1.0], [0.4, 0.4]]))
    expected = torch.tensor([[0, 0.5, 0.25, 0], [0, 0.2, -0.2, 0]])
    torch.testing.assert_close(batch["advantages"], expected)


def test_a_cut_can_count_as_the_end():
    batch, _ = learner_with_critic("critic.bootstrap_truncated=false").prepare(rows())
    torch.testing.assert_close(batch["returns"][:, 1:3], torch.tensor([[1.0, 1.0], [0.0, 0.0]]))


def test_the_critic_has_epochs_of_its_own_and_weights_that_sum_to_one():
    learner = learner_with_critic(
        "critic.epochs=3", "algorithm.minibatches=2", "algorithm.epochs=1"
    )
    beats: list[None] = []
    metrics = learner.learn(rows(), beat=lambda: beats.append(None))
    assert learner.critic is not None
    steps = learner.critic.engine.steps  # type: ignore[attr-defined]
    assert len(steps) == 6
    assert len(learner.policy.steps) == 2  # type: ignore[attr-defined]
    assert len(beats) == 8
    assert all(step["value_loss_weights"].sum() == pytest.approx(1) for step in steps)
    assert metrics["critic/loss"] == 3.5
    assert metrics["actor/loss"] == 1.5
    # Returns 1, 1, 0.4, 0.4 of variance 0.09; errors 0.5, 0.25, 0.2, -0.2.
    variance = (0.5**2 + 0.25**2 + 2 * 0.2**2) / 4 - (0.75 / 4) ** 2
    assert metrics["critic/explained_variance"] == pytest.approx(1 - variance / 0.09, abs=1e-5)


@pytest.mark.parametrize(("version", "num_steps"), [(0, 0), (1, 0), (2, 1)])
def test_the_policy_waits_until_the_critic_is_warm(version: int, num_steps: int):
    learner = learner_with_critic("critic.warmup_steps=2", version=version)
    metrics = learner.learn(rows())
    assert len(learner.policy.steps) == num_steps  # type: ignore[attr-defined]
    assert "critic/loss" in metrics


def test_the_coefficient_of_the_penalty_is_steered_to_its_target():
    options = ("algorithm.kl_in_reward=true", "algorithm.kl_coef=0.1", "algorithm.kl_target=0.5")
    config = config_of(*options, "algorithm.kl_horizon=10")
    policy = Known(train_logprobs=torch.tensor([[0.0, -1, -1, 0], [0.0, -1, -1, 0]]))
    reference = Known(train_logprobs=torch.tensor([[0.0, -2, -1, 0], [0.0, -1, -2, 0]]))
    learner = Learner(config, policy, reference=reference)  # type: ignore[arg-type]
    batch, metrics = learner.prepare(rows())
    assert metrics["actor/ref_kl"] == 1.0
    assert metrics["actor/kl_coef"] == 0.1
    # Error 1, clipped to 0.2, over 2 of 10 responses.
    assert learner.kl_coef == pytest.approx(0.1 * (1 + 0.2 * 2 / 10))
    torch.testing.assert_close(batch["token_rewards"][0], torch.tensor([0.0, -0.1, 1.0, 0.0]))
    assert batch["rewards"].tolist() == pytest.approx([0.9, -0.1])


def test_a_penalty_in_the_reward_is_no_term_of_the_loss():
    config = AlgorithmConfig(kl_coef=0.1, kl_in_reward=True)
    assert build_objective(config).kl_coef == 0.0
    assert not is_single_step(config)
    batch = make_batch([1], [0])
    assert "kl_loss_weights" not in next(minibatches(batch, config))
    assert build_objective(AlgorithmConfig(kl_coef=0.1)).kl_coef == 0.1


def test_corrections_come_one_after_the_other():
    options = "algorithm.corrections=[{method: veto, kwargs: {low: 0.2}}, {method: tis}]"
    # Ratios: the first row has e^-2 < 0.2 and is dropped; the second e^2, truncated to 2.
    policy = Known(train_logprobs=torch.tensor([[0.0, -2, 0, 0], [0.0, 2, 0, 0]]))
    learner = Learner(config_of(options), policy)  # type: ignore[arg-type]
    batch, metrics = learner.prepare(rows())
    assert batch["loss_mask"].any(1).tolist() == [False, True]
    torch.testing.assert_close(batch["behaviour_weights"][1], torch.tensor([0.0, 2, 1, 0]))
    assert "behaviour/weight_max" in metrics


def test_the_likeliest_tokens_are_those_of_the_teachers_own_distribution():
    logits = torch.tensor([[[0.0, 0, 0], [0.0, 1, 2]], [[0.0, 0, 0], [3.0, 1, 2]]])

    class Teacher:
        def forward(self, batch: TensorDict, post_hook: Any, aggregate_fn: Any) -> Any:
            parts = [post_hook(logits[row : row + 1], batch) for row in range(2)]
            return aggregate_fn([item for part in parts for item in part])

    ids, logprobs = likeliest(make_batch([1, 1], [0, 1]), Teacher(), 2)  # type: ignore[arg-type]
    assert ids[:, 1].tolist() == [[2, 1], [0, 2]]
    expected = logits.log_softmax(-1).gather(2, ids)
    torch.testing.assert_close(logprobs, expected)


def test_batches_in_which_nothing_is_said_are_reported_once(caplog):
    learner = Learner(config_of(), Known(train_logprobs=torch.zeros(2, 4)))  # type: ignore[arg-type]
    said = rows()
    empty = said.copy()
    empty["loss_mask"] = torch.zeros_like(said["loss_mask"])
    for batch in (empty, empty, said, empty, empty):
        learner.prepare(batch)
    assert "empty" not in caplog.text
    for _ in range(3):
        learner.prepare(empty)
    assert caplog.text.count("every response of the last 3 batches was empty") == 1
