"""From the rows of a rollout to optimizer steps, without engines."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from tandem.algorithms.objective import PolicyObjective, Recorder
from tandem.config import AlgorithmConfig, TrainConfig
from tandem.train import EngineRegistry
from tandem.trainers.rl_batch import (
    build_objective,
    minibatches,
    rollout_metrics,
    same_version_mismatch,
    score,
    select_tokens,
)


class Scores:
    """A train engine that knows the log-probabilities and its version."""

    def __init__(self, logprobs: torch.Tensor | None = None) -> None:
        self._logprobs = logprobs

    def forward(
        self, batch: TensorDict, *, outputs: tuple[str, ...], trained_only: bool
    ) -> dict[str, torch.Tensor]:
        assert outputs == ("train_logprobs",)
        assert trained_only
        assert self._logprobs is not None, "nobody should ask"
        return {"train_logprobs": self._logprobs}


def make_batch(lengths: list[int], episodes: list[int], num_columns: int = 6) -> TensorDict:
    """Rows with one prompt token and ``lengths`` sampled ones."""
    columns = torch.arange(num_columns)
    loss_mask = torch.stack([(columns >= 1) & (columns <= n) for n in lengths])
    num_rows = len(lengths)
    return TensorDict(
        {
            "loss_mask": loss_mask,
            "attention_mask": loss_mask | (columns == 0),
            "advantages": loss_mask.float(),
            "prox_logprobs": torch.zeros(num_rows, num_columns),
            "logprobs": torch.zeros(num_rows, num_columns),
            "versions": torch.where(loss_mask, 3, -1),
            "rewards": torch.arange(num_rows).float(),
            "truncated": torch.zeros(num_rows, dtype=torch.bool),
            "episode_ids": torch.tensor(episodes),
            "sample_ids": torch.arange(num_rows),
        },
        batch_size=[num_rows],
    )


def test_minibatches_are_whole_episodes_and_every_epoch_has_all_of_them():
    batch = make_batch([1, 2, 3, 4, 5, 5], episodes=[7, 7, 9, 9, 4, 8])
    parts = list(minibatches(batch, AlgorithmConfig(minibatches=2, epochs=2)))
    assert [part["episode_ids"].tolist() for part in parts] == [[7, 7, 9, 9], [4, 8]] * 2


def test_every_optimizer_step_has_weights_of_its_own_that_sum_to_one():
    batch = make_batch([1, 2, 3, 4], episodes=[1, 1, 2, 2])
    first, second = minibatches(batch, AlgorithmConfig(minibatches=2))
    assert first["loss_weights"].sum() == pytest.approx(1)
    assert first["loss_weights"].max() == pytest.approx(1 / 3)
    assert second["loss_weights"].sum() == pytest.approx(1)
    assert second["loss_weights"].max() == pytest.approx(1 / 7)
    assert not first["loss_weights"][~first["loss_mask"]].any()


def test_weights_of_the_other_terms_are_there_when_the_terms_are():
    batch = make_batch([1, 2], episodes=[1, 1])
    (plain,) = minibatches(batch, AlgorithmConfig())
    assert {"kl_loss_weights", "entropy_loss_weights"}.isdisjoint(plain.keys())
    (full,) = minibatches(batch, AlgorithmConfig(kl_coef=0.1, entropy_coef=0.1))
    assert torch.equal(full["kl_loss_weights"], full["loss_weights"])
    assert torch.equal(full["entropy_loss_weights"], full["loss_weights"])


def test_mismatch_counts_only_tokens_that_the_present_weights_made():
    batch = make_batch([2, 2], episodes=[1, 1])
    batch["versions"][0, 1] = 2
    batch["prox_logprobs"][0, 1] = 9.0  # an older version: a difference is expected
    batch["prox_logprobs"][0, 2] = 0.25
    batch["prox_logprobs"][0, 4] = 5.0  # padding
    metrics = same_version_mismatch(batch, 3)
    assert metrics["mismatch/same_version_max"] == 0.25
    assert metrics["mismatch/same_version_over_1e-5"] == pytest.approx(1 / 3)
    assert same_version_mismatch(batch, 4) == {}


def test_rollout_metrics_leave_out_samples_without_a_reward():
    batch = make_batch([1, 3, 5, 0], episodes=[1, 1, 2, 2])
    batch["rewards"] = torch.tensor([1.0, float("nan"), 0.0, 0.5])
    batch["truncated"][2] = True
    metrics = rollout_metrics(batch)
    assert metrics["reward/mean"] == 0.5
    assert metrics["reward/std"] == pytest.approx((1 / 6) ** 0.5)
    assert metrics["response_length/mean"] == 2.25
    assert metrics["response_length/max"] == 5
    assert metrics["response_length/empty_fraction"] == 0.25
    assert metrics["response_length/truncated_fraction"] == 0.25


def test_batch_without_any_reward_has_no_reward_metric():
    batch = make_batch([1], episodes=[1])
    batch["rewards"] = torch.tensor([float("nan")])
    assert "reward/mean" not in rollout_metrics(batch)


def test_kl_cov_holds_back_the_token_of_largest_covariance():
    batch = make_batch([2, 2], episodes=[1, 2])
    batch["advantages"] = torch.tensor([[0, 2.0, 2, 0, 0, 0], [0, -1.0, -1, 0, 0, 0]])
    logprobs = torch.tensor([[9.0, -1, -2, 0, 0, 0], [9.0, -5, -1, 9, 9, 9]])
    # Means over the four tokens: 0.5 and -2.25; products 1.875, 0.375, 4.125, -1.875.
    selected = select_tokens(batch, Scores(logprobs), AlgorithmConfig(policy_loss="kl_cov"))
    assert selected["cov_selected"].nonzero().tolist() == [[1, 1]]


def test_clip_cov_holds_back_one_of_its_candidates():
    batch = make_batch([2, 2], episodes=[1, 2])
    batch["advantages"] = torch.tensor([[0, 2.0, 2, 0, 0, 0], [0, -1.0, -1, 0, 0, 0]])
    logprobs = torch.tensor([[9.0, -1, -2, 0, 0, 0], [9.0, -5, -1, 9, 9, 9]])
    batch["prox_logprobs"] = logprobs.clone()
    selected = select_tokens(batch, Scores(logprobs), AlgorithmConfig(policy_loss="clip_cov"))
    assert selected["cov_selected"].sum() == 1
    # Covariance between 1 and 5: the first and the third token of the four.
    assert selected["cov_selected"][0, 1] or selected["cov_selected"][1, 1]


def test_other_losses_need_no_selection():
    batch = make_batch([2], episodes=[1])
    assert "cov_selected" not in select_tokens(batch, Scores(), AlgorithmConfig())


def test_clip_range_of_the_configuration_reaches_the_loss():
    config = AlgorithmConfig(policy_loss="ppo_clip", clip_low=0.1, clip_high=0.3)
    assert build_objective(config).policy_kwargs == {"clip_low": 0.1, "clip_high": 0.3}
    config = AlgorithmConfig(policy_loss="clip_cov", clip_low=0.1, clip_high=0.3)
    assert build_objective(config).policy_kwargs == {"clip_low": 0.1, "clip_high": 0.3}


def test_single_step_equals_a_separate_pass_for_prox(tiny_model_dir):
    """Same loss, update and recorded log-probabilities, over several micro-batches."""
    generator = torch.Generator().manual_seed(0)
    batch = make_batch([1, 3, 5, 4], episodes=[1, 1, 2, 2])
    batch["input_ids"] = torch.randint(3, 20, (4, 6), generator=generator)
    batch["advantages"] = torch.randn(4, 6, generator=generator) * batch["loss_mask"]
    results = []
    for single_step in (True, False):
        engine = EngineRegistry.new(
            "language_model",
            "local",
            config=TrainConfig(lr=1e-2, microbatch_size=2),
            model_path=str(tiny_model_dir),
        )
        engine.initialize()
        objective = PolicyObjective(single_step=single_step)
        given = batch.copy()
        if single_step:
            del given["prox_logprobs"]
            expected = score(given, engine)
            objective = Recorder(objective, given)
        else:
            given["prox_logprobs"] = score(given, engine)
        (minibatch,) = minibatches(given, AlgorithmConfig())
        step = engine.train_batch(minibatch, objective)
        mask = batch["loss_mask"]
        assert torch.allclose(given["prox_logprobs"][mask], expected[mask], atol=1e-6)
        weights = torch.cat([p.detach().flatten() for p in engine.parameters().values()])
        results.append((step["loss"], step["grad_norm"], weights))
        engine.destroy()
    (loss, norm, weights), (other_loss, other_norm, other_weights) = results
    assert loss == pytest.approx(other_loss, abs=1e-7)
    assert norm == pytest.approx(other_norm, rel=1e-6)
    assert norm > 0.1
    assert torch.allclose(weights, other_weights, atol=1e-6)


def test_a_trajectory_of_several_rows_counts_once():
    batch = make_batch([2, 3, 1, 4], episodes=[1, 1, 1, 1])
    batch["sample_ids"] = torch.tensor([7, 7, 7, 3])
    batch["rewards"] = torch.tensor([1.0, 1.0, 1.0, 0.0])
    batch["truncated"] = torch.tensor([False, False, True, False])
    metrics = rollout_metrics(batch)
    # By hand: two trajectories, of 2 + 3 + 1 and of 4 tokens.
    assert metrics["reward/mean"] == 0.5
    assert metrics["reward/std"] == 0.5
    assert metrics["response_length/mean"] == 5.0
    assert metrics["response_length/max"] == 6.0
    assert metrics["response_length/truncated_fraction"] == 0.5


def test_entropy_is_measured_when_asked_for_and_changes_nothing():
    quiet = build_objective(AlgorithmConfig())
    loud = build_objective(AlgorithmConfig(log_entropy=True))
    assert quiet.required_outputs == {"train_logprobs"}
    assert loud.required_outputs == {"train_logprobs", "entropy"}
    batch = make_batch([2, 3], episodes=[1, 2])
    (minibatch,) = minibatches(batch, AlgorithmConfig())
    logprobs = torch.full(batch["logprobs"].shape, -1.0, requires_grad=True)
    outputs = {"train_logprobs": logprobs, "entropy": torch.full_like(logprobs, 0.25)}
    loss, metrics = loud(outputs, minibatch)
    assert metrics["actor/entropy"].value.item() == 0.25
    assert torch.equal(loss.detach(), quiet(outputs, minibatch)[0].detach())
