import math

import pytest
import torch
from tensordict import TensorDict

from tandem.algorithms.correction import (
    CORRECTIONS,
    behaviour_correction,
    prox_loglinear,
)
from tandem.algorithms.mismatch import mismatch_metrics
from tandem.errors import ConfigError, DataError

NAN = float("nan")


def make_batch():
    """Ratios prox / sampler: row 0 has e^0.5 and e^-2, row 1 has 1."""
    return TensorDict(
        {
            "loss_mask": torch.tensor([[0, 1, 1], [0, 1, 0]]).bool(),
            "prox_logprobs": torch.tensor([[NAN, -1.0, -3.0], [NAN, -1.0, NAN]]),
            "logprobs": torch.tensor([[NAN, -1.5, -1.0], [NAN, -1.0, NAN]]),
        },
        batch_size=[2],
    )


def weights_of(**options):
    out, metrics = behaviour_correction(make_batch(), **options)
    return out["behaviour_weights"], out["loss_mask"], metrics


def test_tokens_over_the_cap_are_dropped_and_the_others_weighted():
    weights, mask, metrics = weights_of(cap=1.2)
    torch.testing.assert_close(
        weights, torch.tensor([[0, 0, math.exp(-2)], [0, 1, 0]], dtype=torch.float32)
    )
    assert mask.equal(make_batch()["loss_mask"])
    assert metrics["behaviour/dropped_fraction"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("method", CORRECTIONS)
@pytest.mark.parametrize("drop", [True, False])
def test_junk_outside_the_mask_never_leaks_and_the_callers_batch_stays(method, drop):
    batch = make_batch()
    out, metrics = behaviour_correction(batch, method=method, drop_from_denominator=drop)
    assert out["behaviour_weights"].isfinite().all()
    assert out["behaviour_weights"][~batch["loss_mask"]].eq(0).all()
    assert all(math.isfinite(value) for value in metrics.values())
    assert not (out["loss_mask"] & ~batch["loss_mask"]).any()
    assert "behaviour_weights" not in batch
    assert batch["loss_mask"].equal(make_batch()["loss_mask"])


def test_dropped_tokens_leave_the_mask_when_asked_and_for_rejections_by_default():
    kept = torch.tensor([[0, 0, 1], [0, 1, 0]]).bool()
    assert weights_of(cap=1.2, drop_from_denominator=True)[1].equal(kept)
    in_band = torch.tensor([[0, 1, 0], [0, 1, 0]]).bool()
    assert weights_of(method="mis")[1].equal(in_band)
    assert weights_of(method="mis", drop_from_denominator=False)[1].equal(make_batch()["loss_mask"])


def test_veto_drops_the_whole_row_and_a_weighting_may_follow():
    batch, _ = behaviour_correction(make_batch(), method="veto", low=0.2)
    assert batch["loss_mask"].tolist() == [[False] * 3, [False, True, False]]
    batch, _ = behaviour_correction(batch, method="tis", cap=2.0)
    assert batch["behaviour_weights"].tolist() == [[0, 0, 0], [0, 1, 0]]


def test_sequence_rejection_uses_the_geometric_mean():
    geometric = math.exp((0.5 - 2) / 2)
    _, mask, _ = weights_of(method="mis", level="sequence", low=geometric + 0.01, high=2.0)
    assert mask.any(dim=1).tolist() == [False, True]
    _, mask, _ = weights_of(method="mis", level="sequence", low=geometric - 0.01, high=2.0)
    assert mask.any(dim=1).tolist() == [True, True]


def test_normalised_weights_have_mean_one_over_the_trained_tokens():
    weights, mask, _ = weights_of(method="tis", normalise=True)
    assert weights[mask].mean().item() == pytest.approx(1.0)


def test_wrong_arguments_are_refused():
    with pytest.raises(ConfigError, match="method: got 'none', allowed: decoupled_cap"):
        behaviour_correction(make_batch(), method="none")
    with pytest.raises(ConfigError, match="cap: got 0"):
        weights_of(cap=0)
    with pytest.raises(ConfigError, match=r"low, high: got 3\.0, 2\.0"):
        weights_of(method="icepop", low=3.0, high=2.0)
    with pytest.raises(DataError, match="prox_logprobs: missing"):
        behaviour_correction(make_batch().exclude("prox_logprobs"))


def test_loglinear_prox_runs_from_sampler_to_current_policy():
    prox = prox_loglinear(
        torch.tensor([-1.0, -1.0, -1.0, -1.0]),
        torch.tensor([-2.0, -2.0, -2.0, -2.0]),
        sampler_versions=torch.tensor([3, 5, 7, 6]),
        prox_version=5,
        current_version=7,
    )
    torch.testing.assert_close(prox, torch.tensor([-1.5, -2.0, -1.0, -2.0]))


def test_equal_logprobs_have_no_mismatch():
    logprobs = torch.tensor([[0.0, -1.0, -2.0]])
    metrics = mismatch_metrics(logprobs, logprobs, torch.tensor([[0, 1, 1]]))
    assert metrics.pop("mismatch/ess") == 1.0
    assert set(metrics.values()) == {0.0}


def test_mismatch_names_the_largest_gap_under_the_mask():
    metrics = mismatch_metrics(
        torch.tensor([[NAN, -1.0, -2.5]]),
        torch.tensor([[NAN, -1.1, -2.0]]),
        torch.tensor([[0, 1, 1]]),
    )
    assert metrics["mismatch/logprob_abs_diff_max"] == pytest.approx(0.5)
    assert metrics["mismatch/logprob_abs_diff"] == pytest.approx(0.3)
    assert metrics["mismatch/kl"] == pytest.approx(0.2)
    assert mismatch_metrics(torch.ones(1, 2), torch.ones(1, 2), torch.zeros(1, 2)) == {}


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        # Row 0 has the product e^-1.5 and the geometric mean e^-0.75, row 1 has 1.
        ("seq_tis_product", {}, (math.exp(-1.5), 1.0)),
        ("seq_tis_product", {"cap": 0.5}, (math.exp(-1.5), 0.5)),
        ("seq_tis_product", {"cap": 0.1}, (0.1, 0.1)),
        ("seq_tis_geometric", {}, (math.exp(-0.75), 1.0)),
        ("seq_tis_geometric", {"cap": 0.3}, (0.3, 0.3)),
        ("seq_mis_product", {}, (0.0, 1.0)),
        ("seq_mis_product", {"low": 0.2}, (1.0, 1.0)),
    ],
)
def test_sequence_weights_are_the_product_or_the_geometric_mean_that_the_name_says(
    method, options, expected
):
    weights, mask, _ = weights_of(method=method, **options)
    rows = make_batch()["loss_mask"]
    torch.testing.assert_close(weights, rows * torch.tensor(expected)[:, None])
    is_rejection = method == "seq_mis_product"
    assert mask.equal(rows & (weights > 0) if is_rejection else rows)


def test_geometric_rejection_keeps_the_row_that_rejection_by_the_product_drops():
    by_mean, _, _ = weights_of(method="mis", level="sequence", low=0.4)
    by_product, _, _ = weights_of(method="seq_mis_product", low=0.4)
    assert by_mean[0].any()
    assert not by_product[0].any()


@pytest.mark.parametrize("method", CORRECTIONS)
def test_no_gradient_flows_through_a_correction(method):
    batch = make_batch()
    for key in ("prox_logprobs", "logprobs"):
        batch[key] = batch[key].requires_grad_()
    out, _ = behaviour_correction(batch, method=method)
    assert not out["behaviour_weights"].requires_grad


def test_an_unknown_parameter_of_a_correction_is_named():
    with pytest.raises(ConfigError, match="correction veto: it does not take 'cap', allowed: drop"):
        behaviour_correction(make_batch(), method="veto", cap=2.0)
