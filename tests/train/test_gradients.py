"""Loss and gradients against a plain Hugging Face loop, for every cut and layout of a batch."""

import math

import pytest
import torch
from tensordict import TensorDict

from tandem.data.batch import collate
from tandem.errors import DataError
from tandem.types import Metric
from tests.train import reference
from tests.train.conftest import engine_gradients, left_padded, make_batch, make_rows, nll

LENGTHS = [3, 9, 5, 7, 20, 1, 14, 2]


@pytest.fixture(scope="module")
def expected(model_path):
    return reference.gradients(reference.load(model_path), make_rows(LENGTHS))


def assert_same(engine, loss, expected):
    expected_loss, expected_gradients = expected
    assert loss == pytest.approx(expected_loss, abs=1e-6)
    found = engine_gradients(engine)
    assert found.keys() == expected_gradients.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_tokens_per_microbatch": 20},
        {"max_tokens_per_microbatch": 31},
        {"microbatch_size": 1},
        {"microbatch_size": 3},
        {"gradient_checkpointing": True},
    ],
    ids=str,
)
def test_every_cut_gives_the_gradient_of_the_plain_loop(make_engine, expected, config):
    engine = make_engine(**config)
    output = engine.forward_backward_batch(make_batch(LENGTHS), nll)
    assert output.outputs == {}
    assert_same(engine, output.loss, expected)


def test_padding_side_and_row_order_do_not_matter(make_engine, expected):
    engine = make_engine(max_tokens_per_microbatch=25)
    batch = make_batch(LENGTHS)
    shuffled = batch[torch.tensor([5, 2, 7, 0, 1, 6, 4, 3])]
    for variant in (left_padded(batch), shuffled):
        engine.optimizer_zero_grad()
        assert_same(engine, engine.forward_backward_batch(variant, nll).loss, expected)


def test_a_step_may_span_several_calls(make_engine, expected):
    engine = make_engine()
    batch = make_batch(LENGTHS)
    losses = [engine.forward_backward_batch(part, nll).loss for part in batch.split(3)]
    assert_same(engine, sum(losses), expected)


def test_token_mean_weighs_every_token_alike_however_it_is_cut(make_engine):
    """Per-token losses: one row of 4 tokens with sum 10, two rows of 3 tokens with sum 35."""
    losses = [[0.0, 1.0, 2.0, 3.0, 4.0], [0.0, 10.0, 5.0], [0.0, 20.0]]
    batch = collate(
        [
            {
                "input_ids": torch.arange(len(row)),
                "advantages": torch.tensor(row),
                "loss_weights": (torch.arange(len(row)) > 0) / 7,
            }
            for row in losses
        ]
    )

    def loss_fn(outputs, microbatch):
        ratio = outputs["train_logprobs"] - outputs["train_logprobs"].detach()
        return ((1 + ratio) * microbatch["advantages"] * microbatch["loss_weights"]).sum(), {}

    gradients = []
    for rows in (1, 2, 3):
        engine = make_engine(microbatch_size=rows)
        assert engine.forward_backward_batch(batch, loss_fn).loss == pytest.approx(45 / 7, abs=1e-5)
        gradients.append(engine_gradients(engine))
    for name in gradients[0]:
        for other in gradients[1:]:
            torch.testing.assert_close(gradients[0][name], other[name], rtol=1e-6, atol=2e-5)


def test_response_tokens_including_the_first_and_the_end_are_the_targets(make_engine, model_path):
    ids, mask = torch.tensor([11, 12, 21, 22, 2]), torch.tensor([0, 0, 1, 1, 1])
    batch = collate([{"input_ids": ids, "loss_mask": mask.bool(), "loss_weights": mask / 3}])
    metrics = make_engine().train_batch(batch, nll)
    with torch.no_grad():
        expected = reference.logprobs(reference.load(model_path), ids)
    assert metrics["loss"] == pytest.approx(-expected[2:].mean().item(), abs=1e-6)
    assert metrics["num_trained_tokens"] == 3


def test_temperature_of_each_row_divides_its_logits(make_engine, model_path):
    rows = make_rows([6, 8])
    rows[0]["temperature"], rows[1]["temperature"] = 0.6, 1.7
    engine = make_engine()
    output = engine.forward_backward_batch(collate(rows), nll)
    model = reference.load(model_path)
    losses, gradients = zip(
        *(reference.gradients(model, [row], row["temperature"]) for row in rows), strict=True
    )
    total = {name: gradients[0][name] + gradients[1][name] for name in gradients[0]}
    assert_same(engine, output.loss, (sum(losses), total))


@pytest.mark.parametrize("value", [0.0, math.nan, -1.0])
def test_temperatures_that_cannot_be_trained_at_are_refused(make_engine, value):
    batch = make_batch([4, 4])
    batch["temperature"] = torch.tensor([1.0, value])
    with pytest.raises(DataError, match="temperature: row 1"):
        make_engine().forward(batch)


def test_a_batch_without_weights_is_refused(make_engine):
    batch = make_batch([4]).exclude("loss_weights")
    with pytest.raises(DataError, match="loss_weights"):
        make_engine().train_batch(batch, nll)


def test_loss_weight_fn_combines_means(make_engine):
    batch = make_batch([9, 3, 7]).exclude("loss_weights")

    def mean_loss(outputs, microbatch):
        mask = microbatch["loss_mask"]
        return -(outputs["train_logprobs"] * mask).sum() / mask.sum(), {}

    def weight(microbatch):
        return microbatch["loss_mask"].sum()

    whole, cut = make_engine(), make_engine(microbatch_size=1)
    first = whole.forward_backward_batch(batch, mean_loss, weight)
    second = cut.forward_backward_batch(batch, mean_loss, weight)
    assert first.loss == pytest.approx(second.loss, abs=1e-6)
    mine, other = engine_gradients(whole), engine_gradients(cut)
    for name in mine:
        torch.testing.assert_close(mine[name], other[name], rtol=0, atol=1e-6)


def test_a_weightless_microbatch_never_reaches_the_loss(make_engine):
    batch = make_batch([9, 3, 7])
    batch["loss_weights"][1] = 0.0
    seen = []

    def poisoned(outputs, microbatch):
        seen.append(microbatch.batch_size[0])
        loss, _ = nll(outputs, microbatch)
        is_poisoned = float(microbatch["loss_weights"].sum()) == 0.0
        return loss * (math.nan if is_poisoned else 1.0), {}

    engine = make_engine(microbatch_size=1)
    metrics = engine.train_batch(batch, poisoned)
    assert seen == [1, 1]
    assert math.isfinite(metrics["loss"])
    assert metrics["update_successful"] == 1


def test_nothing_to_train_is_loss_zero_and_no_step(make_engine):
    batch = make_batch([3, 3])
    batch["loss_weights"].zero_()
    engine = make_engine(weight_decay=0.1)
    before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    metrics = engine.train_batch(batch, nll)
    assert (metrics["loss"], metrics["grad_norm"], metrics["update_successful"]) == (0.0, 0.0, 0.0)
    for name, gradient in engine_gradients(engine).items():
        assert torch.equal(gradient, torch.zeros_like(gradient)), name
    assert all(torch.equal(before[n], p) for n, p in engine.model.named_parameters())
    assert engine.skipped_steps == 0


def test_rows_without_a_response_are_legal(make_engine):
    rows = make_rows([5, 4])
    rows[1]["loss_mask"] = torch.zeros(4, dtype=torch.bool)
    rows[1]["loss_weights"] = torch.zeros(4)
    assert math.isfinite(make_engine(microbatch_size=1).train_batch(collate(rows), nll)["loss"])


def test_rows_without_any_token_are_legal(make_engine):
    batch = make_batch([4, 4])
    whole = make_engine().forward_backward_batch(batch[:1], nll).loss
    batch["attention_mask"][1] = False
    batch["loss_weights"][1] = 0.0
    for rows in (None, 1):
        output = make_engine(microbatch_size=rows).forward_backward_batch(
            batch, nll, return_outputs=True
        )
        assert output.loss == pytest.approx(whole, abs=1e-6)
        assert output.outputs["train_logprobs"][1].abs().sum() == 0


def test_the_callers_batch_is_not_changed(make_engine):
    batch = make_batch([5, 3])
    before = batch.clone()

    def rude(outputs, microbatch):
        loss, _ = nll(outputs, microbatch)
        microbatch["loss_mask"].logical_not_()
        microbatch["extra"] = torch.ones(microbatch.batch_size)
        return loss, {}

    make_engine().train_batch(batch, rude)
    after, before = dict(batch.items()), dict(before.items())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_outputs_when_training_only_if_asked(make_engine):
    batch = make_batch(LENGTHS)
    engine = make_engine(max_tokens_per_microbatch=20)
    output = engine.forward_backward_batch(batch, nll, return_outputs=True)
    assert not output.outputs["train_logprobs"].requires_grad
    torch.testing.assert_close(
        output.outputs["train_logprobs"], engine.forward(batch)["train_logprobs"]
    )


def test_metrics_are_averaged_with_their_weights(make_engine):
    batch = make_batch([9, 3, 7])

    def loss_fn(outputs, microbatch):
        lengths = microbatch["attention_mask"].sum(1).float()
        return nll(outputs, microbatch)[0], {
            "mean": Metric(lengths.mean(), lengths.sum()),
            "sum": Metric(lengths.sum(), reduction="sum"),
            "max": Metric(lengths.max(), reduction="max"),
            "min": Metric(lengths.min(), reduction="min"),
            "nothing": Metric(math.nan, 0.0),
        }

    metrics = make_engine(microbatch_size=1).train_batch(batch, loss_fn)
    assert metrics["mean"] == pytest.approx((81 + 9 + 49) / 19)
    assert (metrics["sum"], metrics["max"], metrics["min"]) == (19, 9, 3)
    assert "nothing" not in metrics


def test_pairs_stay_in_one_microbatch(make_engine):
    batch = make_batch([4, 5, 6, 7])
    batch["group_ids"] = torch.tensor([0, 1, 0, 1])
    seen = []

    def pairwise(outputs, microbatch):
        seen.append(microbatch["group_ids"].tolist())
        return nll(outputs, microbatch)

    pairwise.keep_together = "group_ids"
    make_engine(microbatch_size=1).train_batch(batch, pairwise)
    assert seen == [[0, 0], [1, 1]]


def test_entropy_has_a_gradient(make_engine, model_path):
    batch = make_batch([6, 4])

    def entropy_loss(outputs, microbatch):
        return (outputs["entropy"] * microbatch["loss_weights"]).sum(), {}

    entropy_loss.required_outputs = frozenset({"entropy"})
    engine = make_engine()
    loss = engine.forward_backward_batch(batch, entropy_loss).loss
    model, total = reference.load(model_path), torch.zeros(())
    for row in make_rows([6, 4]):
        log_probs = model(row["input_ids"][None]).logits[0, :-1].log_softmax(-1)
        total = total - ((log_probs.exp() * log_probs).sum(-1) * row["loss_weights"][1:]).sum()
    total.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert_same(engine, loss, (total.item(), gradients))


def test_a_loss_that_is_no_scalar_is_refused(make_engine):
    with pytest.raises(DataError, match="scalar"):
        make_engine().train_batch(make_batch([4]), lambda o, m: (o["train_logprobs"], {}))


def test_unknown_outputs_are_refused(make_engine):
    def wants_values(outputs, microbatch):
        return nll(outputs, microbatch)

    wants_values.required_outputs = frozenset({"values"})
    with pytest.raises(DataError, match="values"):
        make_engine().train_batch(make_batch([4]), wants_values)


def test_a_row_over_the_cap_is_named(make_engine):
    with pytest.raises(DataError, match="row 1: 9 tokens > 8"):
        make_engine(max_tokens_per_microbatch=8).train_batch(make_batch([4, 9]), nll)


def test_eval_batch_is_the_loss_of_the_step(make_engine):
    engine = make_engine(max_tokens_per_microbatch=20)
    batch = make_batch(LENGTHS)
    evaluated = engine.eval_batch(batch, nll)
    assert all(p.grad is None for p in engine.model.parameters())
    assert engine.train_batch(batch, nll)["loss"] == pytest.approx(evaluated, abs=1e-6)


def test_a_jagged_batch_trains_like_a_padded_one(make_engine, expected):
    rows = make_rows(LENGTHS)
    fields = {
        key: torch.nested.as_nested_tensor([row[key] for row in rows], layout=torch.jagged)
        for key in rows[0]
    }
    batch = TensorDict(fields, batch_size=[len(rows)])
    engine = make_engine(max_tokens_per_microbatch=25)
    assert_same(engine, engine.forward_backward_batch(batch, nll).loss, expected)
