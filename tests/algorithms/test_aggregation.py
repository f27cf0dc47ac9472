import pytest
import torch

from tandem.algorithms.aggregation import AGGREGATION_MODES, loss_weights
from tandem.algorithms.sft import sft_loss
from tandem.errors import ConfigError, DataError
from tandem.testing.numerics.case import over_ranks

LOSS = torch.tensor([[1.0, 2, 3, 4], [10, 20, 0, 0], [5, 0, 0, 0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]).bool()


def weights(mode, mask=MASK, **options):
    options.setdefault("horizon", 8)
    return loss_weights(mode, mask, dtype=torch.float64, **options)


@pytest.mark.parametrize("cut", [[3], [1, 2], [2, 1], [1, 1, 1]])
@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_every_cut_into_micro_batches_gives_the_same_loss(mode, cut):
    expected = {
        "token-mean": 45 / 7,
        "token-sum": 45.0,
        "seq-mean-token-sum": 15.0,
        "seq-mean-token-mean": (2.5 + 15 + 5) / 3,
        "seq-mean-token-sum-norm": 15.0 / 8,
    }[mode]
    parts = zip(weights(mode).split(cut), LOSS.split(cut), strict=True)
    assert sum((w * loss).sum().item() for w, loss in parts) == pytest.approx(expected)


def test_micro_batched_gradient_equals_the_whole_batch_gradient():
    def gradient(cut):
        parameter = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        for w, loss, mask in zip(
            weights("token-mean").split(cut), LOSS.split(cut), MASK.split(cut), strict=True
        ):
            total, _ = sft_loss(
                {"train_logprobs": -parameter * loss}, {"loss_mask": mask, "loss_weights": w}
            )
            total.backward()
        return parameter.grad.item()

    assert gradient([3]) == pytest.approx(45 / 7)
    assert gradient([1, 2]) == pytest.approx(45 / 7)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_every_split_over_ranks_gives_the_same_weights(mode):
    shards = MASK.split([1, 2])
    per_rank = over_ranks([lambda reduce, m=m: weights(mode, m, reduce=reduce) for m in shards])
    torch.testing.assert_close(torch.cat(per_rank), weights(mode))


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_nothing_to_train_gives_zero_weights_and_zero_gradients(mode):
    mask = torch.zeros(2, 3, dtype=torch.bool)
    w = weights(mode, mask)
    logprobs = torch.full((2, 3), -1.0, dtype=torch.float64, requires_grad=True)
    loss, metrics = sft_loss({"train_logprobs": logprobs}, {"loss_mask": mask, "loss_weights": w})
    loss.backward()
    assert loss.item() == 0.0
    assert logprobs.grad.eq(0).all()
    assert metrics["sft/nll"].weight == 0


def test_filtered_tokens_leave_numerator_and_denominator():
    lengths = torch.tensor([10, 15, 5])
    mask = torch.arange(15) < lengths[:, None]
    mask[2] = False
    w = weights("token-mean", mask)
    assert w.sum().item() == pytest.approx(1.0)
    assert w[0, 0].item() == pytest.approx(1 / 25)


@pytest.mark.parametrize(
    "mode", ["seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
def test_a_trajectory_split_into_rows_counts_once(mode):
    whole = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    split = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]]).bool()
    w_whole = weights(mode, whole)
    w_split = weights(mode, split, sample_ids=torch.tensor([7, 3, 7]))
    assert w_split[0, 0].item() == pytest.approx(w_whole[0, 0].item())
    assert w_split[2, 0].item() == pytest.approx(w_whole[0, 0].item())
    assert w_split[1, 0].item() == pytest.approx(w_whole[1, 0].item())


def test_row_without_trained_tokens_is_not_counted():
    mask = torch.cat([MASK, torch.zeros(1, 4, dtype=torch.bool)])
    torch.testing.assert_close(
        weights("seq-mean-token-sum", mask)[:3], weights("seq-mean-token-sum")
    )


def test_weights_are_float32_by_default_and_the_mask_is_kept():
    mask = MASK.clone()
    assert loss_weights("token-mean", mask).dtype == torch.float32
    assert mask.equal(MASK)


def test_wrong_arguments_are_refused():
    with pytest.raises(ConfigError, match="aggregation: got 'mean', allowed: token-mean"):
        loss_weights("mean", MASK)
    with pytest.raises(ConfigError, match="horizon: got None"):
        loss_weights("seq-mean-token-sum-norm", MASK)
    with pytest.raises(DataError, match=r"loss_mask: got shape \(3,\)"):
        loss_weights("token-mean", MASK[:, 0])
    with pytest.raises(DataError, match=r"sample_ids: got shape \(2,\)"):
        loss_weights("token-mean", MASK, sample_ids=torch.tensor([1, 2]))
