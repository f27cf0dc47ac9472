"""Every loss under every aggregation, in float64 through the engine: the cut changes nothing."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from tandem.algorithms import AGGREGATION_MODES, POLICY_LOSSES, loss_weights
from tandem.algorithms.distillation import DIVERGENCES
from tandem.algorithms.objective import PolicyObjective
from tandem.algorithms.sft import sft_loss
from tandem.algorithms.value import ValueObjective
from tandem.config import TrainConfig
from tandem.data.batch import WEIGHT_KEYS
from tandem.errors import DataError
from tandem.train.local import LocalTrainEngine, LocalValueEngine
from tests.train.conftest import VOCABULARY, make_batch

LENGTHS = [3, 9, 5, 7, 12, 2]
CUTS = ({"microbatch_size": 1}, {"max_tokens_per_microbatch": 14})


class Double:
    """A local engine that computes in float64."""

    compute_dtype = torch.float64

    def _build(self, addr):
        return super()._build(addr).double()


class DoubleEngine(Double, LocalTrainEngine):
    pass


class DoubleValueEngine(Double, LocalValueEngine):
    pass


@pytest.fixture(scope="module")
def engines(model_path):
    """One policy and one critic; a test changes how they cut."""
    made = []
    for kind in (DoubleEngine, DoubleValueEngine):
        engine = kind(TrainConfig(device="cpu", max_grad_norm=None), model_path=model_path)
        engine.initialize()
        made.append(engine)
    yield dict(zip(("policy", "value"), made, strict=True))
    for engine in made:
        engine.destroy()


def full_batch(mode: str) -> TensorDict:
    """Uneven rows, two of them one trajectory and one without a trained token, all keys."""
    batch = make_batch(LENGTHS)
    generator = torch.Generator().manual_seed(1)
    shape = tuple(batch["input_ids"].shape)

    def random(*size: int) -> torch.Tensor:
        return torch.rand(*size, generator=generator, dtype=torch.float64)

    batch["loss_mask"][5] = False
    sample_ids = torch.tensor([0, 0, 1, 2, 3, 4])
    weights = loss_weights(
        mode, batch["loss_mask"], sample_ids=sample_ids, horizon=9, dtype=torch.float64
    )
    for key in WEIGHT_KEYS:
        batch[key] = weights
    for key in ("prox_logprobs", "ref_logprobs", "values", "returns"):
        batch[key] = -5 * random(*shape)
    batch["advantages"] = (2 * random(shape[0], 1) - 1).expand(shape).clone()
    batch["behaviour_weights"] = random(*shape)
    batch["cov_selected"] = random(*shape) < 0.3
    batch["temperature"] = random(shape[0]) + 0.5
    batch["candidate_ids"] = torch.randint(VOCABULARY, (*shape, 4), generator=generator)
    batch["candidate_teacher_logprobs"] = random(*shape, 5).log_softmax(-1)[..., :4]
    return batch


def step(engine, batch, loss_fn, cut):
    plain = {"microbatch_size": None, "max_tokens_per_microbatch": 4096}
    engine.config = engine.config.model_copy(update=plain | cut)
    engine.optimizer_zero_grad()
    output = engine.forward_backward_batch(batch, loss_fn)
    gradient = torch.cat([p.grad.flatten() for p in engine.parameters().values()])
    assert gradient.dtype == torch.float64
    return output.loss, gradient


def assert_invariant(engine, batch, loss_fn):
    loss, gradient = step(engine, batch, loss_fn, {})
    assert float(gradient.abs().max()) > 1e-3
    for cut in CUTS:
        other_loss, other_gradient = step(engine, batch, loss_fn, cut)
        assert other_loss == pytest.approx(loss, abs=1e-6)
        torch.testing.assert_close(other_gradient, gradient, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_policy_loss_does_not_depend_on_the_cut(engines, name, mode):
    objective = PolicyObjective(policy_loss=name, kl_coef=0.1, entropy_coef=0.01)
    assert_invariant(engines["policy"], full_batch(mode), objective)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_divergence_from_a_teacher_does_not_depend_on_the_cut(engines, divergence, mode):
    objective = PolicyObjective(distill_coef=0.5, divergence=divergence)
    assert_invariant(engines["policy"], full_batch(mode), objective)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_value_loss_does_not_depend_on_the_cut(engines, mode):
    assert_invariant(engines["value"], full_batch(mode), ValueObjective(clip=0.2))


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_supervised_loss_does_not_depend_on_the_cut(engines, mode):
    assert_invariant(engines["policy"], full_batch(mode), sft_loss)


def test_candidates_are_those_of_the_full_distribution(engines):
    batch = full_batch("token-mean")
    engine = engines["policy"]
    found = engine.infer_batch(batch, PolicyObjective(distill_coef=1.0))
    logprobs = engine.forward(batch, post_hook=lambda logits, _: logits.log_softmax(-1))
    expected = logprobs.gather(2, batch["candidate_ids"]).float()
    mask = batch["loss_mask"]
    torch.testing.assert_close(
        found.outputs["candidate_logprobs"][mask], expected[mask], rtol=0, atol=1e-5
    )


def test_a_row_without_tokens_takes_part_in_a_step_with_candidates(engines):
    batch = full_batch("token-mean")
    batch["attention_mask"][5] = False
    assert_invariant(engines["policy"], batch, PolicyObjective(distill_coef=1.0))


@pytest.mark.parametrize("ids", [None, torch.zeros(6, 12, dtype=torch.int64)])
def test_missing_or_misshapen_candidates_are_refused(engines, ids):
    batch = full_batch("token-mean").exclude("candidate_ids")
    if ids is not None:
        batch["candidate_ids"] = ids
    with pytest.raises(DataError, match="candidate_ids: got"):
        engines["policy"].forward_backward_batch(batch, PolicyObjective(distill_coef=1.0))
