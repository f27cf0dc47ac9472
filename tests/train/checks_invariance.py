"""Every loss on two data-parallel ranks, against one process in float64. Run by ``ranks``."""

from __future__ import annotations

import math

import torch

from tandem.config.schema import ParallelConfig, TrainConfig
from tandem.train.fsdp import FSDPRewardEngine, FSDPTrainEngine, FSDPValueEngine
from tandem.train.local import LocalRewardEngine, LocalTrainEngine, LocalValueEngine
from tests.train.loss_cases import loss_cases
from tests.train.ranks import COLLECTIVE_TIMEOUT_S, Rank

TOLERANCE = 1e-6


class _Double:
    compute_dtype = torch.float64


class _DoubleLocal(_Double):
    def _build(self, addr):
        return super()._build(addr).double()


SHARDED = {
    "policy": type("DoubleFSDPPolicy", (_Double, FSDPTrainEngine), {}),
    "value": type("DoubleFSDPValue", (_Double, FSDPValueEngine), {}),
    "reward": type("DoubleFSDPReward", (_Double, FSDPRewardEngine), {}),
}
LOCAL = {
    "policy": type("DoublePolicy", (_DoubleLocal, LocalTrainEngine), {}),
    "value": type("DoubleValue", (_DoubleLocal, LocalValueEngine), {}),
    "reward": type("DoubleReward", (_DoubleLocal, LocalRewardEngine), {}),
}


def _made(kinds, backend, model_path):
    parallel = ParallelConfig(timeout_s=COLLECTIVE_TIMEOUT_S)
    config = TrainConfig(
        backend=backend, device="cpu", max_grad_norm=None, microbatch_size=1, parallel=parallel
    )
    engines = {name: kind(config, model_path=model_path) for name, kind in kinds.items()}
    for engine in engines.values():
        engine.initialize()
    return engines


def _gradients(engine):
    return {
        name: engine._full_tensor(p.grad).double().clone()
        for name, p in engine.parameters().items()
    }


def every_loss_equals_one_process(here: Rank) -> None:
    sharded = _made(SHARDED, "fsdp", here.models["plain"])
    local = _made(LOCAL, "local", here.models["plain"]) if here.is_first else {}
    here._made += [*sharded.values(), *local.values()]
    failed = []
    for case in loss_cases():
        engine = sharded[case.engine]
        engine.optimizer_zero_grad()
        found = engine.forward_backward_batch(case.share(here.rank, here.world), case.loss_fn)
        gradients = _gradients(engine)
        if not here.is_first:
            continue
        oracle = local[case.engine]
        oracle.optimizer_zero_grad()
        expected = oracle.forward_backward_batch(case.batch, case.loss_fn)
        error = _error(gradients, _gradients(oracle))
        if abs(found.loss - expected.loss) > TOLERANCE * max(1.0, abs(expected.loss)):
            failed.append(f"{case.name}: loss {found.loss}, one process {expected.loss}")
        if not error <= TOLERANCE:
            failed.append(f"{case.name}: gradients differ by {error:.2g} of their norm")
    assert not failed, "\n".join(failed)


def _error(found, expected):
    """The largest difference of an element, relative to the norm of the whole gradient."""
    assert found.keys() == expected.keys()
    norm = math.sqrt(sum(float(grad.square().sum()) for grad in expected.values()))
    assert norm > 1e-3
    return max(float((found[name] - grad).abs().max()) for name, grad in expected.items()) / norm
