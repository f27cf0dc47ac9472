import math

import pytest
import torch
from tensordict import TensorDict

from tandem.algorithms.aggregation import AGGREGATION_MODES, loss_weights
from tandem.algorithms.objective import PolicyObjective
from tandem.algorithms.policy import POLICY_LOSSES
from tandem.algorithms.registry import get_loss
from tandem.errors import ConfigError, DataError

B, T = 6, 5


def make_batch(mode="token-mean", seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([4, 2, 3, 1, 4, 2])
    position = torch.arange(T)
    mask = (position > 0) & (position <= lengths[:, None])

    def logprobs():
        return -2 * torch.rand(B, T, generator=generator, dtype=torch.float64)

    weights = loss_weights(mode, mask, horizon=9, dtype=torch.float64)
    advantages = torch.randn(B, 1, generator=generator, dtype=torch.float64).expand(B, T)
    return TensorDict(
        {
            "loss_mask": mask,
            "prox_logprobs": logprobs(),
            "ref_logprobs": logprobs(),
            "advantages": advantages.clone(),
            "loss_weights": weights,
            "kl_loss_weights": weights,
            "entropy_loss_weights": weights,
            "behaviour_weights": torch.rand(B, T, generator=generator, dtype=torch.float64),
            "cov_selected": torch.rand(B, T, generator=generator) < 0.2,
        },
        batch_size=[B],
    )


FULL = {"kl_coef": 0.1, "entropy_coef": 0.01}


def gradient(objective, batch, rows):
    """Gradient of the summed loss over micro-batches given as lists of rows, and all metrics."""
    generator = torch.Generator().manual_seed(1)
    logprobs = -2 * torch.rand(B, T, generator=generator, dtype=torch.float64)
    entropy = torch.rand(B, T, generator=generator, dtype=torch.float64)
    logprobs.requires_grad_()
    entropy.requires_grad_()
    total, parts = 0.0, []
    for part in rows:
        loss, metrics = objective(
            {"train_logprobs": logprobs[part], "entropy": entropy[part]}, batch[part]
        )
        loss.backward()
        total += loss.item()
        parts.append(metrics)
    entropy_grad = torch.zeros_like(logprobs) if entropy.grad is None else entropy.grad
    return total, torch.stack([logprobs.grad, entropy_grad]), parts


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_every_cut_gives_the_same_loss_and_gradient(name, mode):
    batch = make_batch(mode)
    objective = PolicyObjective(policy_loss=name, **FULL)
    whole = gradient(objective, batch, [[0, 1, 2, 3, 4, 5]])
    for rows in ([[0], [1], [2], [3], [4], [5]], [[5, 0, 2], [1], [4, 3]]):
        cut = gradient(objective, batch, rows)
        assert cut[0] == pytest.approx(whole[0], abs=1e-12)
        torch.testing.assert_close(cut[1], whole[1], atol=1e-12, rtol=0)


def test_metrics_combine_to_the_whole_batch_value():
    batch, objective = make_batch(), PolicyObjective(**FULL)
    _, _, (whole,) = gradient(objective, batch, [[0, 1, 2, 3, 4, 5]])
    _, _, parts = gradient(objective, batch, [[0, 1], [2, 3, 4, 5]])
    assert {"actor/ppo_kl", "actor/pg_clipfrac", "actor/entropy", "actor/kl_loss"} < set(whole)
    for name, metric in whole.items():
        values = [(float(p[name].value), float(p[name].weight)) for p in parts]
        if metric.reduction == "sum":
            combined = sum(value for value, _ in values)
        else:
            combined = sum(v * w for v, w in values) / sum(w for _, w in values)
        assert combined == pytest.approx(float(metric.value), abs=1e-6), name
        assert not metric.value.requires_grad


def test_terms_add_up_in_closed_form():
    logprobs = torch.tensor([[0.0, -1.0]], dtype=torch.float64, requires_grad=True)
    entropy = torch.tensor([[9.0, 0.5]], dtype=torch.float64)
    one = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    batch = TensorDict(
        {
            "loss_mask": one.bool(),
            "prox_logprobs": torch.tensor([[5.0, -1.0]], dtype=torch.float64),
            "ref_logprobs": torch.tensor([[7.0, -2.0]], dtype=torch.float64),
            "advantages": 2 * one,
            "loss_weights": one,
            "kl_loss_weights": one,
            "entropy_loss_weights": one,
        },
        batch_size=[1],
    )
    objective = PolicyObjective(kl_coef=0.1, kl_estimator="k3", entropy_coef=0.01)
    loss, metrics = objective({"train_logprobs": logprobs, "entropy": entropy}, batch)
    loss.backward()
    assert loss.item() == pytest.approx(-2.0 + 0.1 * math.exp(-1) - 0.01 * 0.5)
    assert logprobs.grad[0].tolist() == pytest.approx([0.0, -2.0 + 0.1 * (1 - math.exp(-1))])
    assert float(metrics["actor/kl_loss"].value) == pytest.approx(math.exp(-1))
    assert float(metrics["actor/entropy"].value) == pytest.approx(0.5)


def test_higher_divergence_raises_the_loss():
    batch = make_batch()
    losses = []
    for shift in (0.0, 1.0, 2.0):
        batch["ref_logprobs"] = batch["prox_logprobs"] - shift
        outputs = {"train_logprobs": batch["prox_logprobs"]}
        losses.append(PolicyObjective(kl_coef=1.0)(outputs, batch)[0].item())
    assert losses[0] < losses[1] < losses[2]


def test_reference_sampler_and_masked_tokens_get_no_gradient():
    batch = make_batch()
    for key in ("ref_logprobs", "prox_logprobs", "behaviour_weights", "advantages"):
        batch[key] = batch[key].masked_fill(~batch["loss_mask"], torch.nan)
    leaves = {key: batch[key].requires_grad_() for key in ("ref_logprobs", "prox_logprobs")}
    logprobs = torch.full((B, T), -1.0, dtype=torch.float64)
    logprobs[~batch["loss_mask"]] = torch.nan
    logprobs.requires_grad_()
    loss, _ = PolicyObjective(kl_coef=0.1)({"train_logprobs": logprobs}, batch)
    loss.backward()
    assert loss.isfinite()
    assert logprobs.grad[~batch["loss_mask"]].eq(0).all()
    assert logprobs.grad.isfinite().all()
    assert all(leaf.grad is None for leaf in leaves.values())


def test_behaviour_weights_scale_the_policy_term_only():
    batch = make_batch()
    outputs = {"train_logprobs": batch["prox_logprobs"] + 0.01}
    batch["behaviour_weights"] = torch.ones(B, T, dtype=torch.float64)
    plain, _ = PolicyObjective()(outputs, batch)
    with_kl, _ = PolicyObjective(kl_coef=1.0)(outputs, batch)
    batch["behaviour_weights"] = torch.full((B, T), 3.0, dtype=torch.float64)
    assert PolicyObjective()(outputs, batch)[0].item() == pytest.approx(3 * plain.item())
    tripled, _ = PolicyObjective(kl_coef=1.0)(outputs, batch)
    assert (tripled - 3 * plain).item() == pytest.approx((with_kl - plain).item())


def test_an_all_masked_micro_batch_has_zero_loss_and_weightless_metrics():
    batch = make_batch()
    batch["loss_mask"] = torch.zeros(B, T, dtype=torch.bool)
    batch["loss_weights"] = torch.zeros(B, T, dtype=torch.float64)
    logprobs = torch.full((B, T), -1.0, dtype=torch.float64, requires_grad=True)
    loss, metrics = PolicyObjective()({"train_logprobs": logprobs}, batch)
    loss.backward()
    assert loss.item() == 0.0
    assert logprobs.grad.eq(0).all()
    assert float(metrics["actor/ppo_kl"].weight) == 0.0


def test_entropy_is_required_only_with_a_coefficient():
    assert PolicyObjective().required_outputs == {"train_logprobs"}
    assert PolicyObjective(entropy_coef=0.1).required_outputs == {"train_logprobs", "entropy"}


def test_missing_weights_are_named():
    batch = make_batch().exclude("kl_loss_weights")
    with pytest.raises(DataError, match="kl_loss_weights: missing from the batch"):
        PolicyObjective(kl_coef=0.1)({"train_logprobs": batch["prox_logprobs"]}, batch)


def test_losses_are_found_by_name_and_wrong_names_are_refused():
    objective = get_loss("policy", policy_loss="gspo", policy_kwargs={"clip_low": 0.1})
    assert objective == PolicyObjective("gspo", {"clip_low": 0.1})
    assert get_loss("sft").__name__ == "sft_loss"
    with pytest.raises(ConfigError, match="did you mean 'policy'"):
        get_loss("polycy")
    with pytest.raises(ConfigError, match="unknown parameter 'beta'"):
        get_loss("sft", beta=1)
    with pytest.raises(ConfigError, match="policy_loss: got 'ppo', allowed: ppo_clip"):
        get_loss("policy", policy_loss="ppo")
    with pytest.raises(ConfigError, match="gspo does not take 'dual_clip', allowed: clip_high"):
        PolicyObjective("gspo", {"dual_clip": 3.0})


def test_interpolated_ratio_lies_between_sampler_and_policy_by_age():
    """A token of the version trained from starts at the sampler, older ones nearer the policy."""
    logprobs = torch.tensor([[0.0, -1.0, -1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    batch = TensorDict(
        {
            "loss_mask": torch.tensor([[False, True, True, True]]),
            "logprobs": torch.tensor([[0.0, -2.0, -2.0, -2.0]], dtype=torch.float64),
            "versions": torch.tensor([[-1, 3, 2, 0]]),
            "prox_version": torch.tensor([3]),
            "advantages": torch.ones(1, 4, dtype=torch.float64),
            "loss_weights": torch.ones(1, 4, dtype=torch.float64),
        },
        batch_size=[1],
    )
    objective = PolicyObjective(
        policy_kwargs={"clip_low": 10.0, "clip_high": 10.0}, interpolates=True
    )
    loss, _ = objective({"train_logprobs": logprobs}, batch)
    # log ratio = (1 - alpha) * (policy - sampler), alpha = age / (age + 1): 1, 1/2 and 1/4.
    ratios = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64).exp()
    assert loss.item() == pytest.approx(-float(ratios.sum()))
    loss.backward()
    # Only the policy's own log-probability moves the ratio: no gradient through the other end.
    torch.testing.assert_close(logprobs.grad[0, 1:], -ratios)

    weighted = PolicyObjective(
        policy_kwargs={"clip_low": 10.0, "clip_high": 10.0},
        interpolates=True,
        correction="tis",
        correction_kwargs={"cap": 1.5},
    )
    loss, metrics = weighted({"train_logprobs": logprobs.detach()}, batch)
    # w = pi_prox / pi_sampler = exp(alpha * 1), at most 1.5.
    w = torch.tensor([0.0, 0.5, 0.75], dtype=torch.float64).exp().clamp(max=1.5)
    assert loss.item() == pytest.approx(-float((w * ratios).sum()))
    assert float(metrics["behaviour/weight_mean"].value) == pytest.approx(float(w.mean()))
