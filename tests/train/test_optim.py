import math

import pytest
import torch
from torch import nn

from tandem.config.schema import OptimizerConfig
from tandem.errors import ConfigError, TrainingDiverged
from tandem.train.optim import (
    build_optimizer,
    export_optimizer,
    import_optimizer,
    learning_rate,
    optimizer_entries,
    scale_gradients,
    squared_norm,
)
from tandem.types import FinetuneSpec
from tests.train.conftest import make_batch, nll

# --- schedules ------------------------------------------------------------------------------------


def test_cosine_with_warmup_and_floor():
    config = OptimizerConfig(lr=1e-5, schedule="cosine", warmup_steps=2, min_lr_ratio=0.1)
    found = [learning_rate(k, config, 10) for k in (0, 1, 2, 4, 6, 9, 10, 50)]
    expected = [
        0.0,
        5e-06,
        1e-05,
        8.681980515339464e-06,
        5.5e-06,
        1.3425421036992098e-06,
        1e-6,
        1e-6,
    ]
    assert found == pytest.approx(expected, abs=1e-15)


def test_linear_and_constant():
    linear = OptimizerConfig(lr=1.0, schedule="linear", warmup_steps=2)
    assert [learning_rate(k, linear, 6) for k in range(8)] == pytest.approx(
        [0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0]
    )
    constant = OptimizerConfig(lr=2.0, warmup_steps=2)
    assert [learning_rate(k, constant, None) for k in (0, 1, 2, 99)] == [0, 1, 2, 2]


def test_a_decay_needs_an_end(make_engine):
    with pytest.raises(ConfigError, match=r"ft_spec"):
        learning_rate(5, OptimizerConfig(schedule="cosine"), None)


def test_the_learning_rate_of_a_step_survives_a_resume(make_engine, tmp_path):
    config = {"lr": 1e-4, "schedule": "cosine", "warmup_steps": 4, "steps": 20}
    engine = make_engine(**config)
    for _ in range(6):
        last = engine.lr_scheduler_step()
    assert last == pytest.approx(0.961940e-4, abs=1e-10)
    engine.save_checkpoint(str(tmp_path), global_step=6)
    resumed = make_engine(**config)
    resumed.load_checkpoint(str(tmp_path))
    batch = make_batch([4])
    assert resumed.train_batch(batch, nll)["lr"] == pytest.approx(0.961940e-4, abs=1e-10)
    assert resumed.step_lr_scheduler() == pytest.approx(0.915735e-4, abs=1e-10)


# --- clipping -------------------------------------------------------------------------------------


def test_gradients_are_clipped_by_their_global_norm():
    grads = [torch.tensor([3.0]), torch.tensor([[4.0]])]
    norm = float(squared_norm(grads).sqrt())
    assert norm == 5.0
    scale_gradients(grads, norm, 1.0)
    assert [float(g) for g in grads] == pytest.approx([0.599999880000024, 0.799999840000032])


@pytest.mark.parametrize("off", [None, math.inf, 6.0])
def test_small_norms_and_no_limit_leave_gradients_alone(off):
    grads = [torch.tensor([3.0, 4.0])]
    scale_gradients(grads, 5.0, off)
    assert grads[0].tolist() == [3.0, 4.0]


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_limits_that_freeze_or_flip_are_refused(bad):
    with pytest.raises(ConfigError, match="max_grad_norm"):
        scale_gradients([torch.tensor([3.0, 4.0])], 5.0, bad)
    with pytest.raises(ValueError, match="max_grad_norm"):
        OptimizerConfig(max_grad_norm=bad)


# --- AdamW ----------------------------------------------------------------------------------------


def parameter(value):
    return {"w": nn.Parameter(torch.tensor([[value]]))}


def step(parameters, optimizer, gradient):
    parameters["w"].grad = torch.tensor([[gradient]])
    optimizer.step()


def test_one_step_in_closed_form():
    parameters = parameter(1.0)
    step(parameters, build_optimizer(parameters, OptimizerConfig(lr=1e-2, weight_decay=0.1)), 0.5)
    assert parameters["w"].item() == pytest.approx(0.9890000002, abs=1e-7)


def test_moments_and_step_count_survive_a_resume():
    config = OptimizerConfig(lr=1e-2)
    parameters = parameter(1.0)
    optimizer = build_optimizer(parameters, config)
    for gradient in (1.0, 1.0):
        step(parameters, optimizer, gradient)
    saved = {k: v.clone() for k, v in export_optimizer(optimizer, parameters).items()}
    resumed = parameter(parameters["w"].item())
    optimizer = build_optimizer(resumed, config)
    entries = optimizer_entries(saved)
    import_optimizer(optimizer, resumed, entries, lambda into, key: into.copy_(saved[key]))
    for gradient in (0.1, 0.1):
        step(resumed, optimizer, gradient)
    assert resumed["w"].item() == pytest.approx(0.9647600123, abs=1e-7)
    assert float(optimizer.state[resumed["w"]]["step"]) == 4


def test_weight_decay_spares_vectors():
    parameters = {"w": nn.Parameter(torch.ones(1, 1)), "b": nn.Parameter(torch.ones(1))}
    optimizer = build_optimizer(parameters, OptimizerConfig(lr=0.5, weight_decay=0.1))
    for p in parameters.values():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert (parameters["w"].item(), parameters["b"].item()) == (pytest.approx(0.95), 1.0)


def test_bf16_computes_in_bf16_over_fp32_masters_and_states(make_engine):
    engine = make_engine(dtype="bfloat16", lr=1e-6)
    exact = make_engine(lr=1e-6)
    batch = make_batch([9, 12])
    before = engine.model.lm_head.weight.detach().clone()
    mine, other = engine.train_batch(batch, nll), exact.train_batch(batch, nll)
    assert 0 < abs(mine["loss"] - other["loss"]) < 0.05
    states = [v for s in engine.optimizer.state.values() for v in s.values()]
    assert states
    assert all(t.dtype == torch.float32 for t in [*states, *engine.parameters().values()])
    # A step of 1e-6 is far below the resolution of bf16.
    moved = (engine.model.lm_head.weight.detach() - before).abs()
    assert float(moved.max()) == pytest.approx(1e-6, rel=0.2)


def test_small_updates_are_not_lost_in_the_masters(make_engine):
    weight = make_engine(dtype="bfloat16").model.lm_head.weight
    with torch.no_grad():
        weight.fill_(1.0)
        for _ in range(100):
            weight.sub_(6e-4)
    assert weight[0, 0].item() == pytest.approx(0.94, abs=1e-5)
    assert weight[0, 0].bfloat16().item() == 0.94140625


# --- non-finite gradients -------------------------------------------------------------------------


def poison(engine):
    for p in engine.parameters().values():
        p.grad = torch.ones_like(p)
    next(iter(engine.parameters().values())).grad.view(-1)[0] = math.nan


def test_a_non_finite_norm_skips_the_step(make_engine):
    engine = make_engine(max_grad_norm=1.0)
    engine.train_batch(make_batch([5]), nll)
    weights = {name: p.detach().clone() for name, p in engine.parameters().items()}
    exported = export_optimizer(engine.optimizer, engine.parameters())
    moments = {name: tensor.clone() for name, tensor in exported.items()}
    poison(engine)
    assert math.isnan(engine.optimizer_step())
    assert all(torch.equal(weights[n], p) for n, p in engine.parameters().items())
    after = export_optimizer(engine.optimizer, engine.parameters())
    assert all(torch.equal(moments[n], t) for n, t in after.items())
    assert all(p.grad is None for p in engine.parameters().values())
    assert engine.skipped_steps == 1


def test_a_non_finite_loss_is_reported_and_skipped(make_engine):
    def broken(outputs, microbatch):
        return nll(outputs, microbatch)[0] * math.inf, {}

    metrics = make_engine().train_batch(make_batch([5]), broken)
    assert metrics["update_successful"] == 0
    assert not math.isfinite(metrics["grad_norm"])


def test_too_many_skips_in_a_row_raise(make_engine):
    engine = make_engine(max_skipped_in_row=3)
    for _ in range(2):
        poison(engine)
        engine.optimizer_step()
    assert engine.train_batch(make_batch([5]), nll)["update_successful"] == 1
    for _ in range(2):
        poison(engine)
        engine.optimizer_step()
    poison(engine)
    with pytest.raises(TrainingDiverged, match="3 steps in a row"):
        engine.optimizer_step()
    assert engine.skipped_steps == 5


def test_split_calls_equal_train_batch(make_engine):
    batch = make_batch([9, 5])
    whole, split = make_engine(max_grad_norm=0.1), make_engine(max_grad_norm=0.1)
    metrics = whole.train_batch(batch, nll)
    split.optimizer_zero_grad()
    split.forward_backward_batch(batch, nll)
    assert split.optimizer_step() == metrics["grad_norm"] > 0.1
    assert all(
        torch.equal(a, b)
        for a, b in zip(whole.parameters().values(), split.parameters().values(), strict=True)
    )


def test_spec_gives_the_schedule_its_end():
    assert FinetuneSpec(2, 10, 4).total_train_steps == 6
