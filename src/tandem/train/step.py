"""The one step loop: micro-batches, accumulation, the loss as a sum, metrics, order restored.

Losses live in ``algorithms``; the optimizer step itself is in ``engine``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from tandem.data.batch import WEIGHT_KEYS, Layout, check_batch, to_padded
from tandem.data.packing import PackedRows, cut_microbatches, dummy_rows, pack
from tandem.errors import DataError
from tandem.train.forward import CANDIDATES, ROW_OUTPUTS
from tandem.train.ranks import on_all_ranks
from tandem.types import LossFn, Metric, Reduction

if TYPE_CHECKING:
    from tandem.train.engine import TrainEngine

LossWeightFn = Callable[[TensorDict], float]
Partial = dict[str, tuple[float, float, Reduction]]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one pass over a batch gave; sums and metrics are over all data-parallel ranks."""

    outputs: dict[str, Tensor]
    loss: float
    metrics: dict[str, float]
    num_rows: int
    num_tokens: int
    num_trained_tokens: int
    num_microbatches: int
    has_weight: bool


def required_outputs(loss_fn: LossFn | None, allowed: Collection[str]) -> frozenset[str]:
    """The outputs a loss asks for by its attribute ``required_outputs``; all must be allowed.

    Beside them a loss of a language model may ask for ``logits`` and ``CANDIDATES``.
    """
    if loss_fn is None:
        return frozenset()
    names = frozenset(getattr(loss_fn, "required_outputs", {"train_logprobs"}))
    extra = ["logits", CANDIDATES] if "train_logprobs" in allowed else []
    known = [*allowed, *extra]
    if unknown := names - set(known):
        raise DataError(f"loss_fn.required_outputs: got {sorted(unknown)}, allowed here: {known}")
    return names


def run_microbatches(
    engine: TrainEngine,
    data: TensorDict,
    loss_fn: LossFn | None,
    loss_weight_fn: LossWeightFn | None,
    *,
    backward: bool,
    keep: Collection[str],
    trained_only: bool = False,
) -> StepResult:
    """Run every micro-batch of ``data``; with ``backward`` their gradients accumulate.

    ``keep`` names the outputs to return, with ``trained_only`` 0 at all other tokens. A
    micro-batch whose weights are all zero contributes a backward pass on zero; the loss function
    does not see it. Every micro-batch is one forward pass (and one backward), so that ranks stay in
    step.
    """
    batch, layout, plan = _prepared(engine, data, loss_fn)
    shares = _shares(engine, batch, plan, loss_fn, loss_weight_fn)
    names = required_outputs(loss_fn, engine.output_names)
    collector = Collector(batch, keep)
    losses: list[Tensor] = []
    metrics: list[Mapping[str, Metric]] = []
    for number, (rows, share) in enumerate(zip(plan, shares, strict=True), start=1):
        is_last = number == len(plan)
        if share == 0.0:
            with torch.set_grad_enabled(backward):
                outputs = _score(engine, batch, rows if keep else [], names | set(keep), None)
                if backward:
                    engine._backward(_nothing(outputs), is_last=is_last)
            collector.add(rows if keep else [], outputs)
            continue
        # Positions that no one asks for are not projected to the vocabulary.
        narrow = trained_only or (loss_fn is not None and not keep)
        predict = trained_mask(batch, rows) if narrow else None
        with torch.set_grad_enabled(backward):
            outputs = _score(engine, batch, rows, names | set(keep), predict)
            if loss_fn is not None:
                microbatch = batch[_index(rows, batch)].to(engine.device)
                loss, found = _call_loss(loss_fn, outputs, microbatch)
                if backward:
                    # A loss without a graph still owes the other ranks its pass.
                    scaled = loss * share if loss.requires_grad else _nothing(outputs)
                    engine._backward(scaled, is_last=is_last)
                losses.append(loss.detach() * share)
                metrics.append(found)
        collector.add(rows, outputs)
    return _result(engine, batch, layout, collector, losses, metrics, shares, plan)


def run_hook(
    engine: TrainEngine,
    data: TensorDict,
    post_hook: Callable[[Tensor, TensorDict], Any],
    output_seqlens: Sequence[int] | None,
) -> list[Any]:
    """Results of ``post_hook(logits, microbatch)`` for every row, in the caller's order."""
    batch, _, plan = _prepared(engine, data, None)
    on_all_ranks(engine, lambda: _check_lengths(output_seqlens, batch.batch_size[0]))
    results: list[Any] = [None] * batch.batch_size[0]
    for rows in plan:
        with torch.no_grad():
            logits = _score(engine, batch, rows, ["logits"], None)["logits"]
            if not rows:
                continue
            value = post_hook(logits, batch[_index(rows, batch)].to(engine.device))
        lengths = None if output_seqlens is None else [output_seqlens[row] for row in rows]
        for row, item in zip(rows, _split_rows(value, len(rows), lengths), strict=True):
            results[row] = item
    return results


def plan_microbatches(
    engine: TrainEngine, batch: TensorDict, loss_fn: LossFn | None, *, count: int | None = None
) -> list[list[int]]:
    """Rows of each micro-batch; ``loss_fn.keep_together`` may name a key of inseparable rows.

    ``count`` is how many there must be, when other ranks have more.
    """
    key = getattr(loss_fn, "keep_together", None)
    if key is not None and key not in batch.keys():  # noqa: SIM118
        raise DataError(f"{key}: missing from the batch; the loss keeps its rows together by it")
    return cut_microbatches(
        batch["attention_mask"].sum(1).tolist(),
        max_tokens=engine.config.max_tokens_per_microbatch,
        max_items=engine.config.microbatch_size,
        groups=None if key is None else batch[key].tolist(),
        agree=None if count is None else lambda own: max(own, count),
    )


def _prepared(
    engine: TrainEngine, data: TensorDict, loss_fn: LossFn | None
) -> tuple[TensorDict, Layout, list[list[int]]]:
    """The batch, checked, padded and cut into as many micro-batches as on every other rank."""

    def check() -> tuple[TensorDict, Layout, list[list[int]]]:
        check_batch(data)
        batch, layout = to_padded(data)
        _check_temperature(batch)
        return batch, layout, plan_microbatches(engine, batch, loss_fn)

    batch, layout, plan = on_all_ranks(engine, check)
    _check_shared_rows(engine, batch)
    count = engine._agree_max(len(plan))
    if count != len(plan):
        plan = plan_microbatches(engine, batch, loss_fn, count=count)
    return batch, layout, plan


def _check_shared_rows(engine: TrainEngine, batch: TensorDict) -> None:
    """Raise unless ranks of one data-parallel rank have the same rows.

    With different ones their collectives would have different shapes, which ends the process.
    """
    group = engine.parallelism_group
    if group is None or dist.get_world_size(group) == engine.get_data_parallel_size():
        return
    digest = hashlib.sha256()
    for key in ("attention_mask", "input_ids", *sorted(set(WEIGHT_KEYS) & set(batch.keys()))):
        value = batch[key].detach().cpu().contiguous()
        digest.update(f"{key}{tuple(value.shape)}{value.dtype}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    seen: dict[int, tuple[int, str]] = {}
    own = (engine.get_data_parallel_rank(), digest.hexdigest())
    for rank, (data_rank, found) in enumerate(engine._gather_over_all(own)):
        first, expected = seen.setdefault(data_rank, (rank, found))
        if found != expected:
            raise DataError(
                f"batch: ranks {first} and {rank} compute the same rows (data-parallel rank "
                f"{data_rank}) but were given different ones; pick the rows of a rank by "
                "get_data_parallel_rank()"
            )


def trained_mask(batch: TensorDict, rows: Sequence[int] | None = None) -> Tensor | None:
    """Tokens that a loss may look at: ``loss_mask`` and every token with a weight; None: all."""
    keys = set(batch.keys())
    if "loss_mask" not in keys:
        return None
    index = slice(None) if rows is None else _index(rows, batch)
    mask = batch["loss_mask"][index].clone()
    for key in WEIGHT_KEYS:
        if key in keys and batch[key].ndim == 2:
            mask |= batch[key][index] != 0
    return mask


# --- metrics --------------------------------------------------------------------------------------


def combine_metrics(found: Iterable[Mapping[str, Metric]]) -> Partial:
    """Metrics of several micro-batches as ``(value, weight, reduction)`` that add up again.

    A mean keeps ``sum(value * weight)``. Entries of weight 0 and NaN values of means count for
    nothing.

    Raises:
        DataError: one name with two reductions.
    """
    total: Partial = {}
    for metrics in found:
        for name, metric in metrics.items():
            value, weight = float(metric.value), float(metric.weight)
            if metric.reduction == "mean":
                if weight == 0.0 or math.isnan(value):
                    continue
                value *= weight
            _merge(total, name, (value, weight, metric.reduction))
    return total


def finish_metrics(partials: Iterable[Partial]) -> dict[str, float]:
    """Final values from the partial ones of all ranks; a mean over nothing is absent."""
    total: Partial = {}
    for partial in partials:
        for name, entry in partial.items():
            _merge(total, name, entry)
    return {
        name: value / weight if reduction == "mean" else value
        for name, (value, weight, reduction) in total.items()
        if reduction != "mean" or weight != 0.0
    }


def _merge(total: Partial, name: str, entry: tuple[float, float, Reduction]) -> None:
    value, weight, reduction = entry
    if name not in total:
        total[name] = entry
        return
    old_value, old_weight, old_reduction = total[name]
    if reduction != old_reduction:
        raise DataError(f"metric {name!r}: reductions {old_reduction!r} and {reduction!r} mixed")
    if reduction in ("mean", "sum"):
        value += old_value
    else:
        value = (min if reduction == "min" else max)(old_value, value)
    total[name] = (value, old_weight + weight, reduction)


# --- helpers of the loop --------------------------------------------------------------------------


class Collector:
    """Outputs of all micro-batches, gathered in the order of the batch."""

    def __init__(self, batch: TensorDict, names: Collection[str]) -> None:
        ids = batch["input_ids"]
        self.outputs = {
            name: torch.zeros((*_shape(name, *ids.shape), *_tail(name, batch)), device=ids.device)
            for name in names
        }

    def add(self, rows: Sequence[int], outputs: Mapping[str, Tensor]) -> None:
        for name, target in self.outputs.items():
            index = torch.tensor(rows, dtype=torch.int64, device=target.device)
            target.index_copy_(0, index, outputs[name].detach().to(target))


def _index(rows: Sequence[int], batch: TensorDict) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=batch["input_ids"].device)


def _score(
    engine: TrainEngine,
    batch: TensorDict,
    rows: Sequence[int],
    names: Collection[str],
    predict: Tensor | None,
) -> dict[str, Tensor]:
    packed: PackedRows | None = None
    temperature = None
    if rows:
        index = _index(rows, batch)
        position_ids = batch.get("position_ids", None)
        packed = pack(
            batch["input_ids"][index],
            batch["attention_mask"][index],
            position_ids_BT=None if position_ids is None else position_ids[index],
            predict_BT=predict,
            candidates_BTK=_candidate_ids(batch)[index] if CANDIDATES in names else None,
        )
        temperature = batch.get("temperature", None)
        temperature = None if temperature is None else temperature[index]
    if packed is None or not packed.lengths:
        # Rows without tokens, or no rows at all: other ranks may still need this one's pass.
        num_candidates = _candidate_ids(batch).shape[2] if CANDIDATES in names else 0
        dummy = engine._score(dummy_rows(num_candidates).to(engine.device), None, names)
        width = batch["input_ids"].shape[1]
        return {
            name: value.sum() * value.new_zeros((*_shape(name, len(rows), width), *value.shape[2:]))
            for name, value in dummy.items()
        }
    return engine._score(packed.to(engine.device), temperature, names)


def _shape(name: str, num_rows: int, width: int) -> tuple[int, ...]:
    return (num_rows,) if name in ROW_OUTPUTS else (num_rows, width)


def _tail(name: str, batch: TensorDict) -> tuple[int, ...]:
    return tuple(_candidate_ids(batch).shape[2:]) if name == CANDIDATES else ()


def _candidate_ids(batch: TensorDict) -> Tensor:
    ids = batch.get("candidate_ids", None)
    expected = tuple(batch["input_ids"].shape)
    if ids is None or ids.ndim != 3 or tuple(ids.shape[:2]) != expected:
        received = "nothing" if ids is None else f"shape {tuple(ids.shape)}"
        raise DataError(
            f"candidate_ids: got {received}, expected int64 {[*expected, 'K']}; the loss asks for "
            f"{CANDIDATES}"
        )
    return ids


def _check_lengths(output_seqlens: Sequence[int] | None, num_rows: int) -> None:
    if output_seqlens is not None and len(output_seqlens) != num_rows:
        raise DataError(f"output_seqlens: got {len(output_seqlens)} lengths, expected {num_rows}")


def _check_temperature(batch: TensorDict) -> None:
    temperature = batch.get("temperature", None)
    if temperature is None:
        return
    bad = (~(temperature > 0) | ~temperature.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise DataError(
            f"temperature: row {bad[0]} has {float(temperature[bad[0]])}, allowed: finite and > 0 "
            "(greedy rows cannot be trained on)"
        )


def _shares(
    engine: TrainEngine,
    batch: TensorDict,
    plan: Sequence[Sequence[int]],
    loss_fn: LossFn | None,
    loss_weight_fn: LossWeightFn | None,
) -> list[float]:
    """What each micro-batch's loss is multiplied with; 0 where there is nothing to train."""
    if loss_fn is None:
        return [1.0 if rows else 0.0 for rows in plan]
    if loss_weight_fn is not None:
        weights = on_all_ranks(engine, lambda: _weights(engine, batch, plan, loss_weight_fn))
        total = engine._sum_over_ranks(sum(weights))
        return [weight / total if total else 0.0 for weight in weights]
    keys = on_all_ranks(engine, lambda: _weight_keys(batch))
    weighted = [(batch[key] != 0).unsqueeze(-1).flatten(1).any(1) for key in keys]
    has_weight = torch.stack(weighted).any(0).tolist()
    return [1.0 if any(has_weight[row] for row in rows) else 0.0 for rows in plan]


def _weights(
    engine: TrainEngine,
    batch: TensorDict,
    plan: Sequence[Sequence[int]],
    loss_weight_fn: LossWeightFn,
) -> list[float]:
    weights = [
        float(loss_weight_fn(batch[_index(rows, batch)].to(engine.device))) if rows else 0.0
        for rows in plan
    ]
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        raise DataError(f"loss_weight_fn: got {weights}, allowed: finite numbers >= 0")
    return weights


def _weight_keys(batch: TensorDict) -> list[str]:
    keys = [key for key in WEIGHT_KEYS if key in batch.keys()]  # noqa: SIM118
    if not keys:
        raise DataError(
            f"loss_weights: missing; the loss is a sum, so the batch needs one of "
            f"{', '.join(WEIGHT_KEYS)} (or pass loss_weight_fn for a mean per micro-batch)"
        )
    return keys


def _nothing(outputs: Mapping[str, Tensor]) -> Tensor:
    """Zero, with a graph through every output."""
    return 0.0 * torch.stack([value.sum() for value in outputs.values()]).sum()


def _call_loss(
    loss_fn: LossFn, outputs: Mapping[str, Tensor], microbatch: TensorDict
) -> tuple[Tensor, Mapping[str, Metric]]:
    result = loss_fn(outputs, microbatch)
    if not isinstance(result, tuple) or len(result) != 2:
        raise DataError("loss_fn: expected (loss, metrics), received " + type(result).__name__)
    loss, metrics = result
    if not isinstance(loss, Tensor) or loss.ndim != 0:
        received = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise DataError(f"loss_fn: expected a scalar tensor as loss, received {received}")
    return loss, {
        name: Metric(_detached(metric.value), _detached(metric.weight), metric.reduction)
        for name, metric in metrics.items()
    }


def _detached(value: float | Tensor) -> float | Tensor:
    return value.detach() if isinstance(value, Tensor) else value


def _result(
    engine: TrainEngine,
    batch: TensorDict,
    layout: Layout,
    collector: Collector,
    losses: Sequence[Tensor],
    metrics: Sequence[Mapping[str, Metric]],
    shares: Sequence[float],
    plan: Sequence[Sequence[int]],
) -> StepResult:
    mask = batch["attention_mask"]
    trained = trained_mask(batch)
    counts = [
        float(torch.stack(list(losses)).double().sum()) if losses else 0.0,
        float(mask.shape[0]),
        float(mask.sum()),
        float((mask if trained is None else mask & trained).sum()),
        float(any(share != 0.0 for share in shares)),
    ]
    found = engine._gather_over_ranks((counts, combine_metrics(metrics)))
    loss, rows, tokens, num_trained, has_weight = (
        math.fsum(column) for column in zip(*(own for own, _ in found), strict=True)
    )
    return StepResult(
        outputs={
            name: value if name in ROW_OUTPUTS else layout.restore(value)
            for name, value in collector.outputs.items()
        },
        loss=loss,
        metrics=finish_metrics(partial for _, partial in found),
        num_rows=int(rows),
        num_tokens=int(tokens),
        num_trained_tokens=int(num_trained),
        num_microbatches=len(plan),
        has_weight=has_weight > 0,
    )


def _split_rows(value: Any, num_rows: int, lengths: Sequence[int] | None) -> Sequence[Any]:
    """The hook's result of one micro-batch, row by row."""
    size = len(value) if isinstance(value, Tensor | list | tuple) else -1
    if lengths is not None and isinstance(value, Tensor) and size == sum(lengths):
        return value.split(list(lengths))
    if lengths is None and size == num_rows:
        return value.split(1) if isinstance(value, Tensor) else value
    expected = num_rows if lengths is None else sum(lengths)
    raise DataError(f"post_hook: expected {expected} entries along dimension 0, received {size}")
