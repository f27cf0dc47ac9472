"""Engines over several ranks that are broken on purpose, with faults that one rank cannot show."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import torch
import torch.distributed as dist

from tandem.data.batch import to_padded
from tandem.train import EngineRegistry, LocalTrainEngine, step
from tandem.train.fsdp import FSDPTrainEngine
from tandem.train.sequence_parallel import SequenceGroup
from tests.testing.data_parallel import DataParallelEngine

RANK_MUTANTS: dict[str, tuple[str, str, dict[str, int]]] = {}
"""Name of the backend -> check that must fail, part of the name of the figure, degrees."""


def breaks(check, figure, **parallel):
    def register(engine):
        EngineRegistry.register("language_model", engine.__name__, "cpu")(engine)
        RANK_MUTANTS[engine.__name__] = (check, figure, parallel)
        return engine

    return register


@breaks("world size", "gradient of")
class AveragesOverRanks(DataParallelEngine):
    def _grad_norm(self):
        super()._grad_norm()
        for parameter in self.parameters().values():
            parameter.grad /= dist.get_world_size()
        return LocalTrainEngine._grad_norm(self)


@breaks("loss_weight_fn", "gradient of")
class CountsTokensPerRank(DataParallelEngine):
    def _run(self, data, loss_fn, loss_weight_fn, *args):
        self.first_sum_is_own = loss_weight_fn is not None
        return super()._run(data, loss_fn, loss_weight_fn, *args)

    def _sum_over_ranks(self, value):
        total = super()._sum_over_ranks(value)
        is_own, self.first_sum_is_own = getattr(self, "first_sum_is_own", False), False
        return value if is_own else total


class OwnNorm(DataParallelEngine):
    """Clips and skips by the norm of what a rank had before the sum."""

    def _grad_norm(self):
        own = LocalTrainEngine._grad_norm(self)
        super()._grad_norm()
        return own


@breaks("optimizer steps", "norm of step 0")
class ClipsByTheLocalNorm(OwnNorm):
    pass


@breaks("non-finite gradient", "TrainingDiverged")
class SkipsByTheLocalNorm(OwnNorm):
    pass


@breaks("zero-weight rank", "gradient of")
class AveragesOverRanksThatHaveWeight(DataParallelEngine):
    def _grad_norm(self):
        has_any = any(p.grad is not None and p.grad.any() for p in self.parameters().values())
        share = sum(self._gather_over_ranks(has_any)) / dist.get_world_size()
        super()._grad_norm()
        for parameter in self.parameters().values():
            parameter.grad *= share
        return LocalTrainEngine._grad_norm(self)


@breaks("uneven tokens", "gradient of")
class WeighsRanksByTokens(DataParallelEngine):
    def _run(self, data, *args):
        self.num_tokens = float(to_padded(data)[0]["attention_mask"].sum())
        return super()._run(data, *args)

    def _grad_norm(self):
        total = self._sum_over_ranks(self.num_tokens)
        for parameter in self.parameters().values():
            if parameter.grad is not None:
                parameter.grad *= self.num_tokens / total * dist.get_world_size()
        return super()._grad_norm()


@breaks("unequal micro-batches", "gradient of")
class StopsWithTheFirstRankToFinish(DataParallelEngine):
    def _run(self, data, loss_fn, *args):
        own = len(step.cut_microbatches(
            to_padded(data)[0]["attention_mask"].sum(1).tolist(),
            max_tokens=self.config.max_tokens_per_microbatch,
            max_items=self.config.microbatch_size,
        ))  # fmt: skip
        self.left = min(self._gather_over_ranks(own))
        return super()._run(data, loss_fn, *args)

    def _backward(self, loss, **kwargs):
        self.left -= 1
        super()._backward(loss if self.left >= 0 else 0.0 * loss, **kwargs)


@breaks("tensor parallelism", "gradient of", tensor=2)
class CountsCopiesOfRowsTwice(FSDPTrainEngine):
    def _backward(self, loss, **kwargs):
        super()._backward(loss * self.config.parallel.tensor, **kwargs)


class OtherSlices(FSDPTrainEngine):
    """Broken once it has been built: a sharded engine would refuse to start."""

    group = SequenceGroup

    def _build_optimizer(self):
        self._sequence = self.group(self.layout.sequence)
        return super()._build_optimizer()


class LocalPositions(SequenceGroup):
    def part(self, packed):
        part = super().part(packed)
        positions = part.position_ids
        goes_on = (positions == 0).cumsum(1) == 0
        return replace(part, position_ids=positions - goes_on * positions[:, :1])


class LocalShift(SequenceGroup):
    def part(self, packed):
        size = -(-packed.input_ids.shape[1] // self.size)
        inside = packed.sources // size == (packed.sources + 1) // size
        names = ("sources", "targets", "slots", "rows")
        return super().part(replace(packed, **{n: getattr(packed, n)[inside] for n in names}))


@breaks("sequence parallelism", "outputs", sequence=2)
class CountsPositionsPerSlice(OtherSlices):
    group = LocalPositions


@breaks("sequence parallelism", "outputs", sequence=2)
class ShiftsPerSlice(OtherSlices):
    group = LocalShift


@breaks("sequence parallelism", "gradient of", sequence=2)
class AveragesOverSlices(FSDPTrainEngine):
    def _backward(self, loss, **kwargs):
        super()._backward(loss / self.config.parallel.sequence, **kwargs)


# --- ranks that do not come back ------------------------------------------------------------------


class Fails(DataParallelEngine):
    """One rank fails while the others wait for it."""

    def set_version(self, version):
        if dist.get_rank() == 1:
            self.fail()
        dist.all_reduce(torch.zeros(1))

    def fail(self):
        raise NotImplementedError


@EngineRegistry.register("language_model", "raises", "cpu")
class Raises(Fails):
    def fail(self):
        raise KeyError("only here")


@EngineRegistry.register("language_model", "dies", "cpu")
class Dies(Fails):
    def fail(self):
        os.write(2, b"the last words\n")
        os._exit(3)


@EngineRegistry.register("language_model", "hangs", "cpu")
class Hangs(Fails):
    def fail(self):
        threading.Event().wait()
