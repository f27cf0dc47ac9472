"""Every loss under every aggregation, in float64: neither cut nor number of ranks matters."""

from __future__ import annotations

import pytest
import torch

from tandem.algorithms.objective import PolicyObjective
from tandem.config import TrainConfig
from tandem.errors import DataError
from tandem.train.local import LocalRewardEngine, LocalTrainEngine, LocalValueEngine
from tests.train import checks_invariance
from tests.train.loss_cases import loss_cases, token_batch
from tests.train.ranks import run_checks

CUTS = ({"microbatch_size": 1}, {"max_tokens_per_microbatch": 19})


class Double:
    """A local engine that computes in float64."""

    compute_dtype = torch.float64

    def _build(self, addr):
        return super()._build(addr).double()


class DoubleEngine(Double, LocalTrainEngine):
    pass


class DoubleValueEngine(Double, LocalValueEngine):
    pass


class DoubleRewardEngine(Double, LocalRewardEngine):
    pass


@pytest.fixture(scope="module")
def engines(model_path):
    """One of each kind; a test changes how they cut."""
    made = []
    for kind in (DoubleEngine, DoubleValueEngine, DoubleRewardEngine):
        engine = kind(TrainConfig(device="cpu", max_grad_norm=None), model_path=model_path)
        engine.initialize()
        made.append(engine)
    yield dict(zip(("policy", "value", "reward"), made, strict=True))
    for engine in made:
        engine.destroy()


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


CASES = list(loss_cases())


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_no_loss_depends_on_the_cut(engines, case):
    assert_invariant(engines[case.engine], case.batch, case.loss_fn)


def test_no_loss_depends_on_the_number_of_ranks(tmp_path, model_path):
    checks = [checks_invariance.every_loss_equals_one_process]
    outcomes = run_checks(2, checks, tmp_path, {"plain": model_path})
    assert set(outcomes.values()) == {None}, "\n".join(filter(None, outcomes.values()))


def test_candidates_are_those_of_the_full_distribution(engines):
    batch = token_batch("token-mean")
    engine = engines["policy"]
    found = engine.infer_batch(batch, PolicyObjective(distill_coef=1.0))
    logprobs = engine.forward(batch, post_hook=lambda logits, _: logits.log_softmax(-1))
    expected = logprobs.gather(2, batch["candidate_ids"]).float()
    mask = batch["loss_mask"]
    torch.testing.assert_close(
        found.outputs["candidate_logprobs"][mask], expected[mask], rtol=0, atol=1e-5
    )


def test_a_row_without_tokens_takes_part_in_a_step_with_candidates(engines):
    batch = token_batch("token-mean")
    batch["attention_mask"][5] = False
    assert_invariant(engines["policy"], batch, PolicyObjective(distill_coef=1.0))


@pytest.mark.parametrize("ids", [None, torch.zeros(6, 12, dtype=torch.int64)])
def test_missing_or_misshapen_candidates_are_refused(engines, ids):
    batch = token_batch("token-mean").exclude("candidate_ids")
    if ids is not None:
        batch["candidate_ids"] = ids
    with pytest.raises(DataError, match="candidate_ids: got"):
        engines["policy"].forward_backward_batch(batch, PolicyObjective(distill_coef=1.0))
