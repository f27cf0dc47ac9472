"""Train engines that are broken on purpose, one fault each, and the check that must find it.

They run on one rank; those that need several are in ``rank_mutants``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch

from tandem.data.batch import to_padded
from tandem.testing.conformance import Outcome
from tandem.train import EngineRegistry, LocalTrainEngine, step
from tandem.train.local import LocalRewardEngine, LocalValueEngine
from tandem.train.optim import set_learning_rate
from tandem.types import SaveLoadMeta


@dataclass(frozen=True)
class Mutant:
    """The check that must fail; ``figure`` must be part of the name of a figure that misses."""

    engine: type[LocalTrainEngine]
    check: str
    figure: str
    options: dict[str, Any] = field(default_factory=dict)


MUTANTS: dict[str, Mutant] = {}
Decorator = Callable[[type[LocalTrainEngine]], type[LocalTrainEngine]]


def breaks(check: str, figure: str = "", **options: Any) -> Decorator:
    """Registers a broken engine under its own name."""

    def register(engine: type[LocalTrainEngine]) -> type[LocalTrainEngine]:
        EngineRegistry.register(engine.model_type, engine.__name__, "cpu")(engine)
        MUTANTS[engine.__name__] = Mutant(
            engine, check, figure, {"model_type": engine.model_type, **options}
        )
        return engine

    return register


def assert_caught(outcome: Outcome, figure: str) -> None:
    assert outcome.verdict == "fail"
    missed = [part.name for part in outcome.parts if not part.passed] or [outcome.detail]
    assert any(figure in name for name in missed), (missed, outcome.trace)


# --- outputs --------------------------------------------------------------------------------------


@breaks("log-probabilities", "train_logprobs")
class ShiftsLabels(LocalTrainEngine):
    def _score(self, *args, **kwargs):
        found = super()._score(*args, **kwargs)
        return found | {name: v.roll(-1, dims=1) for name, v in found.items() if v.ndim == 2}


@breaks("log-probabilities", "train_logprobs")
class IgnoresTemperature(LocalTrainEngine):
    def _score(self, packed, temperature_B, names):
        return super()._score(packed, None, names)


@breaks("entropy", "entropy")
class NegatesEntropy(LocalTrainEngine):
    def _score(self, *args, **kwargs):
        found = super()._score(*args, **kwargs)
        return {name: -v if name == "entropy" else v for name, v in found.items()}


@breaks("values", "values")
class PutsValuesAtTheTokenBefore(LocalValueEngine):
    def _score(self, *args, **kwargs):
        found = super()._score(*args, **kwargs)
        return {n: v.roll(-1, dims=1) if n == "values" else v for n, v in found.items()}


@breaks("values", "bootstrap_values")
class BootstrapsFromTheLastButOne(LocalValueEngine):
    def _score(self, packed, temperature_B, names):
        found = super()._score(packed, temperature_B, {*names, "values"})
        if "bootstrap_values" in names:
            width = found["values"].shape[1]
            found["bootstrap_values"] = found["values"][:, width - 1]
        return {name: found[name] for name in names}


@breaks("scores", "scores")
class ScoresTheTokenBeforeTheLast(LocalRewardEngine):
    def _score(self, packed, temperature_B, names):
        original = type(packed).last_of_rows

        def shifted(rows, values_N):
            return original(rows, values_N.roll(1))

        with mock.patch.object(type(packed), "last_of_rows", shifted):
            return super()._score(packed, temperature_B, names)


@breaks("logits of a hook", "logits")
class HandsOutUnshiftedLogits(LocalTrainEngine):
    def _score(self, packed, temperature_B, names):
        found = super()._score(packed, temperature_B, names)
        if "logits" in found:
            found["logits"] = found["logits"].roll(-1, dims=1)
        return found


@breaks("scoring calls agree", "eval_batch")
class EvaluatesMeans(LocalTrainEngine):
    def eval_batch(self, *args, **kwargs):
        return super().eval_batch(*args, **kwargs) / 2


@breaks("no dropout in scoring", "two scorings", lora=True)
class DropsOutInEval(LocalTrainEngine):
    @contextmanager
    def _model_mode(self, training: bool) -> Iterator[None]:
        with super()._model_mode(True):
            yield


@breaks("packing", "other rows")
class LeaksOverThePack(LocalTrainEngine):
    def _score(self, packed, temperature_B, names):
        whole = replace(packed, lengths=(sum(packed.lengths),))
        return super()._score(whole, temperature_B, names)


@breaks("row order", "outputs")
class LeavesOutputsInOrderOfMicrobatches(LocalTrainEngine):
    def _run(self, data, loss_fn, *args, **kwargs):
        result = super()._run(data, loss_fn, *args, **kwargs)
        plan = step.plan_microbatches(self, to_padded(data)[0], loss_fn)
        order = torch.tensor([row for rows in plan for row in rows])
        return replace(result, outputs={n: v[order] for n, v in result.outputs.items()})


@breaks("padding and layout", "layout")
class ReturnsPaddedForJagged(LocalTrainEngine):
    def _run(self, data, *args, **kwargs):
        return super()._run(to_padded(data)[0], *args, **kwargs)


# --- losses and gradients -------------------------------------------------------------------------


@breaks("losses", "gspo, seq-mean-token-mean")
class ReportsHalfTheLoss(LocalTrainEngine):
    def _run(self, *args):
        result = super()._run(*args)
        return replace(result, loss=0.5 * result.loss)


@breaks("gradients", "gradient of lm_head.weight")
class ForgetsTheHead(LocalTrainEngine):
    def _grad_norm(self):
        self.model.lm_head.weight.grad = None
        return super()._grad_norm()


@breaks("loss_weight_fn", "gradient")
class IgnoresTheWeightsOfMeans(LocalTrainEngine):
    def _run(self, data, loss_fn, loss_weight_fn, *args):
        flat = None if loss_weight_fn is None else lambda microbatch: 1.0
        return super()._run(data, loss_fn, flat, *args)


@breaks("micro-batch cut", "gradient")
class SkipsTheLastMicrobatch(LocalTrainEngine):
    def _run(self, data, loss_fn, *args):
        self.left = len(step.plan_microbatches(self, to_padded(data)[0], loss_fn))
        self.is_single = self.left == 1
        return super()._run(data, loss_fn, *args)

    def _backward(self, loss, **kwargs):
        self.left -= 1
        super()._backward(loss if self.left or self.is_single else 0.0 * loss, **kwargs)


@breaks("micro-batch cut", "gradient")
class AveragesMicrobatches(LocalTrainEngine):
    def _run(self, data, loss_fn, *args):
        self.count = len(step.plan_microbatches(self, to_padded(data)[0], loss_fn))
        return super()._run(data, loss_fn, *args)

    def _backward(self, loss, **kwargs):
        super()._backward(loss / self.count, **kwargs)


@breaks("several calls a step", "gradient")
class StartsAfreshWithEveryCall(LocalTrainEngine):
    def forward_backward_batch(self, *args, **kwargs):
        self.optimizer_zero_grad()
        return super().forward_backward_batch(*args, **kwargs)


@breaks("activation checkpointing", "gradient")
class ScalesCheckpointedGradients(LocalTrainEngine):
    def _backward(self, loss, **kwargs):
        super()._backward(loss * (2 if self.config.gradient_checkpointing else 1), **kwargs)


@breaks("offload", "offload_grads")
class LosesGradientsOnTheWayOut(LocalTrainEngine):
    def _offload_configured(self):
        if self.config.offload_grads:
            self.optimizer_zero_grad()
            self._has_weight = True
        super()._offload_configured()


@breaks("metrics", "kit/mean")
class AveragesMetricsBlindly(LocalTrainEngine):
    def _run(self, *args):
        def combine(found):
            flat = [
                {n: replace(m, weight=1.0) for n, m in metrics.items() if float(m.value) == m.value}
                for metrics in found
            ]
            return original(flat)

        original = step.combine_metrics
        with mock.patch.object(step, "combine_metrics", combine):
            return super()._run(*args)


# --- uneven work ----------------------------------------------------------------------------------


@breaks("zero-weight micro-batch", "the loss was called without weight")
class CallsTheLossWithoutWeight(LocalTrainEngine):
    def _run(self, *args):
        def all_ones(engine, batch, plan, *rest):
            return [1.0 for _ in plan]

        with mock.patch.object(step, "_shares", all_ones):
            return super()._run(*args)


@breaks("nothing to train", "update_successful")
class StepsOnNothing(LocalTrainEngine):
    def optimizer_step(self):
        self._has_weight = True
        return super().optimizer_step()


@breaks("row at the cap", "20 tokens > 19")
class RefusesTheCapItself(LocalTrainEngine):
    def _run(self, *args):
        original = step.cut_microbatches

        def cut(lengths, *, max_tokens, **kwargs):
            return original(lengths, max_tokens=max_tokens - 1, **kwargs)

        with mock.patch.object(step, "cut_microbatches", cut):
            return super()._run(*args)


@breaks("row over the cap", "took a row")
class TruncatesSilently(LocalTrainEngine):
    def _run(self, data, *args):
        cap = self.config.max_tokens_per_microbatch
        if not data["input_ids"].is_nested and data["input_ids"].shape[1] > cap:
            cut = {n: v[:, :cap] if v.ndim == 2 else v for n, v in data.items()}
            data = type(data)(cut, batch_size=data.batch_size)
        return super()._run(data, *args)


@breaks("non-finite gradient", "weights after the skip")
class StepsOnNonFinite(LocalTrainEngine):
    def _grad_norm(self):
        norm = super()._grad_norm()
        return norm if math.isfinite(norm) else 1.0


@breaks("non-finite gradient", "no TrainingDiverged")
class NeverDiverges(LocalTrainEngine):
    def _skip(self, norm):
        self._skipped_in_row = 0
        super()._skip(norm)


# --- the optimizer --------------------------------------------------------------------------------


@breaks("optimizer steps", "weights after")
class KeepsTheOldRate(LocalTrainEngine):
    def _apply_gradients(self, norm):
        self.first_rate = getattr(self, "first_rate", self.learning_rate)
        set_learning_rate(self.optimizer, self.first_rate)
        super()._apply_gradients(norm)


@breaks("optimizer steps", "weights after")
class DoesNotClip(LocalTrainEngine):
    def _apply_gradients(self, norm):
        super()._apply_gradients(0.0)


@breaks("optimizer steps", "weights after")
class DecaysVectorsToo(LocalTrainEngine):
    def _build_optimizer(self):
        optimizer = super()._build_optimizer()
        for group in optimizer.param_groups:
            group["weight_decay"] = self.config.weight_decay
        return optimizer


@breaks("learning rates", "warm-up")
class WarmsUpOneStepEarly(LocalTrainEngine):
    def lr_scheduler_step(self):
        self._schedule_step += 1
        rate = self.learning_rate
        return rate if self._schedule_step > self.config.warmup_steps else 1.5 * rate


@breaks("train_batch in its parts", "gradients are gone")
class KeepsGradients(LocalTrainEngine):
    def optimizer_zero_grad(self):
        pass


# --- adapters -------------------------------------------------------------------------------------


@breaks("reference policy", "disable_adapter", lora=True)
class KeepsTheAdapterOnInTheReference(LocalTrainEngine):
    @contextmanager
    def disable_adapter(self, missing_ok=False):
        yield


@breaks("frozen base", "base weights", lora=True)
class TrainsTheBase(LocalTrainEngine):
    def _apply_gradients(self, norm):
        super()._apply_gradients(norm)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if ".base_layer." in name:
                    parameter.mul_(1.001)


@breaks("exported weights", "plain model", lora=True)
class ExportsUnmerged(LocalTrainEngine):
    def _stream(self, dtype):
        for name, tensor in self.model.state_dict().items():
            if ".lora_" not in name:
                yield name.replace(".base_layer", ""), tensor.to(dtype or tensor.dtype)


# --- exports --------------------------------------------------------------------------------------


@breaks("names of weights", "names")
class ExportsInternalNames(LocalTrainEngine):
    def _stream(self, dtype):
        for name, tensor in super()._stream(dtype):
            yield f"module.{name}", tensor


@breaks("exported weights", "the engine afterwards")
class WritesIntoLiveWeights(LocalTrainEngine):
    def _stream(self, dtype):
        for name, tensor in super()._stream(dtype):
            yield name, tensor.mul_(1.01)


@breaks("tied weights", "lm_head.weight")
class ExportsTiedWeightsTwice(LocalTrainEngine):
    def _stream(self, dtype):
        found = dict(super()._stream(dtype))
        yield from found.items()
        if "lm_head.weight" not in found:
            yield "lm_head.weight", found["model.embed_tokens.weight"]


@breaks("model directory", "plain model")
class SavesTheInitialModel(LocalTrainEngine):
    def save(self, meta: SaveLoadMeta):
        fresh = LocalTrainEngine(self.config, model_path=self.model_path)
        fresh.initialize()
        fresh.save(meta)
        fresh.destroy()


# --- checkpoints ----------------------------------------------------------------------------------


@breaks("resume", "weights")
class ForgetsTheOptimizer(LocalTrainEngine):
    def load_checkpoint(self, *args, **kwargs):
        super().load_checkpoint(*args, **kwargs)
        self.optimizer.state.clear()


@breaks("resume", "version")
class LosesTheVersion(LocalTrainEngine):
    def restore_counters(self, counters):
        super().restore_counters(counters | {"version": 0})


@breaks("training state", "learning rates")
class RestartsTheSchedule(LocalTrainEngine):
    def restore_counters(self, counters):
        super().restore_counters(counters | {"schedule_step": 0})


@breaks("reshard", "local, from this backend")
class ChecksPointsOnlyForItself(LocalTrainEngine):
    """Resumes from its own files, which hold doubled moments that no other engine expects."""

    def save_checkpoint(self, *args, **kwargs):
        self._scale(2.0)
        super().save_checkpoint(*args, **kwargs)
        self._scale(0.5)

    def load_checkpoint(self, *args, **kwargs):
        super().load_checkpoint(*args, **kwargs)
        self._scale(0.5)

    def _scale(self, factor):
        for state in self.optimizer.state.values():
            state["exp_avg"].mul_(factor)


@breaks("version", "version")
class CountsVersionsItself(LocalTrainEngine):
    def train_batch(self, *args, **kwargs):
        self._version += 1
        return super().train_batch(*args, **kwargs)


# --- state ----------------------------------------------------------------------------------------


@breaks("contexts and modes", "after an error")
class StaysInModeAfterErrors(LocalTrainEngine):
    @contextmanager
    def _mode(self, name, parts, disable_auto_offload):
        self._placement.restore(*parts)
        self.mode = name
        self.model.train(name == "train")
        yield
        self.mode = None


@breaks("placement", "after train_mode")
class StaysOnTheDevice(LocalTrainEngine):
    def _offload_configured(self):
        if self._optimizer is None or not self._optimizer.state:
            super()._offload_configured()


@breaks("caller's batch", "advantages was written to")
class NormalisesInPlace(LocalTrainEngine):
    def _run(self, data, *args):
        if not data["advantages"].is_nested:
            data["advantages"].sub_(data["advantages"].mean())
        return super()._run(data, *args)


@breaks("flat memory", "graphs alive")
class KeepsTheGraph(LocalTrainEngine):
    def _backward(self, loss, **kwargs):
        self.losses = [*getattr(self, "losses", []), loss]
        super()._backward(loss, **kwargs)


@breaks("flat memory", "bytes more after scoring")
class HoardsTensors(LocalTrainEngine):
    def _score(self, packed, *args):
        self.inputs = [*getattr(self, "inputs", []), packed.input_ids.clone()]
        return super()._score(packed, *args)


@breaks("topology", "data-parallel rank 1 of 1")
class CountsRanksFromOne(LocalTrainEngine):
    def get_data_parallel_rank(self):
        return 1


@breaks("capabilities", "offload is taken")
class IgnoresWhatItLacks(LocalTrainEngine):
    capabilities = frozenset({"language_model", "lora", "bfloat16", "gradient_checkpointing"})

    def __init__(self, config, **kwargs):
        declared, self.capabilities = self.capabilities, LocalTrainEngine.capabilities
        super().__init__(config, **kwargs)
        self.capabilities = declared
