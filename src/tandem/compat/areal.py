"""AReaL's contracts over our engines: ``TrainEngine``, ``InferenceEngine``, ``Scheduling``.

Needs no AReaL. How its batches, requests and metadata become ours is in ``areal_data``; what its
release 1.0 asks beyond this contract is in ``areal_1_0``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from tandem.compat.alignment import to_next_token
from tandem.compat.areal_data import (
    LLMResponse,
    as_tensordict,
    engine_rows,
    finetune_spec,
    our_request,
    our_rows,
    packed_rows,
    pad_rows,
    save_load_meta,
    select_rows,
    their_rows,
    weight_update_meta,
)
from tandem.rollout import InferenceEngine as OurInferenceEngine
from tandem.rollout import RolloutWorkflow as OurWorkflow
from tandem.rollout.feed import PromptStream, RandomAccessPrompts
from tandem.train import TrainEngine as OurTrainEngine
from tandem.types import LossFn, Metric, ParamSpec, Scheduling

__all__ = ["InferenceEngine", "LLMResponse", "Scheduling", "TrainEngine"]

ROWS = "areal_rows"
"""Key of the row numbers that travel with a micro-batch, to find the caller's rows again."""


class TrainEngine:
    """One of our train engines, used as AReaL uses its own.

    Batches are padded ``[B, T]`` with ``attention_mask``. Losses and hooks get ``logits [N, V]``,
    without temperature, and the same rows packed: per-token tensors ``[N]``, ``cu_seqlens`` and
    ``max_seqlen`` instead of the mask. Entry n of the logits predicts token n + 1 of its row; at a
    row's last token it is zero. With a value model the first argument is ``values [N]``.
    """

    def __init__(self, engine: OurTrainEngine) -> None:
        self.engine = engine

    # --- life cycle ---------------------------------------------------------------------------

    def initialize(self, addr: str | None, ft_spec: Any) -> None:
        self.engine.initialize(addr, finetune_spec(ft_spec))

    def destroy(self) -> None:
        self.engine.destroy()

    @property
    def parallelism_group(self) -> Any:
        """The group of all ranks of this engine, None with one rank."""
        return self.engine.parallelism_group

    def get_scheduling_config(self) -> Scheduling:
        return self.engine.get_scheduling_config()

    def train(self, mode: bool = True) -> TrainEngine:
        self.engine.train(mode)
        return self

    def eval(self) -> TrainEngine:
        return self.train(False)

    # --- weights, versions, files -------------------------------------------------------------

    def upload_weights(self, meta: Any) -> None:
        """Publish the weights; a meta without a version means the next one."""
        self.engine.upload_weights(weight_update_meta(meta, self.get_version() + 1))

    def get_param_specs(self) -> list[ParamSpec]:
        return self.engine.get_param_specs()

    def set_version(self, version: int) -> None:
        self.engine.set_version(version)

    def get_version(self) -> int:
        return self.engine.get_version()

    def save(self, meta: Any) -> None:
        self.engine.save(save_load_meta(meta))

    def load(self, meta: Any) -> None:
        self.engine.load(save_load_meta(meta))

    # --- training and scoring -----------------------------------------------------------------

    def step_lr_scheduler(self) -> None:
        self.engine.step_lr_scheduler()

    def train_batch(
        self,
        input_: TensorDict,
        loss_fn: Callable[[Tensor, TensorDict], Tensor],
        loss_weight_fn: Callable[[TensorDict], float],
    ) -> dict[str, float]:
        """One step on ``sum(w * loss) / sum(w)`` over micro-batches and data-parallel ranks."""
        loss, weight = self._wrap(input_, loss_fn, loss_weight_fn)
        return self.engine.train_batch(self._rows(input_), loss, weight)

    @torch.no_grad()
    def eval_batch(
        self,
        input_: TensorDict,
        loss_fn: Callable[[Tensor, TensorDict], Tensor],
        loss_weight_fn: Callable[[TensorDict], float],
    ) -> Tensor | None:
        """The loss as the step would have it."""
        loss, weight = self._wrap(input_, loss_fn, loss_weight_fn)
        return torch.tensor(self.engine.eval_batch(self._rows(input_), loss, weight))

    @torch.no_grad()
    def forward(
        self,
        input_: TensorDict,
        output_seqlens: list[int] | None = None,
        post_hook: Callable[[Tensor, TensorDict], Any] | None = None,
        aggregate_fn: Callable[[list[Any]], Any] = torch.cat,
    ) -> Any | None:
        """What ``post_hook(logits, packed rows)`` makes of every row; without a hook the logits.

        ``aggregate_fn`` gets one entry a row, in the order of the batch. A tensor that it returns
        is cut by ``output_seqlens`` (default: the rows' lengths) and padded to
        ``[B, longest, ...]``.
        """
        rows = self._rows(input_)
        lengths = output_seqlens or rows["attention_mask"].sum(1).tolist()

        def hook(outputs: Any, microbatch: TensorDict) -> Any:
            if isinstance(outputs, Tensor):
                outputs = {"logits": outputs}
            first, packed = self._arguments(input_, outputs, microbatch)
            return first if post_hook is None else post_hook(first, packed)

        if self._has_logits:
            entries = self.engine.forward(rows, lengths, hook, lambda found: found)
        else:
            found = self.engine.forward(rows)
            entries = [hook(found, rows)]
        joined = aggregate_fn(entries)
        if isinstance(joined, Tensor) and joined.ndim and len(joined) == sum(lengths):
            return pad_rows(joined.split(lengths))
        return joined

    @property
    def _has_logits(self) -> bool:
        return "train_logprobs" in self.engine.output_names

    def _rows(self, input_: Any) -> TensorDict:
        rows = engine_rows(input_)
        rows[ROWS] = torch.arange(rows.batch_size[0], device=rows["input_ids"].device)
        return rows

    def _wrap(
        self, input_: Any, loss_fn: Callable[..., Tensor], loss_weight_fn: Callable[..., Any]
    ) -> tuple[LossFn, Callable[[TensorDict], float]]:
        """An AReaL loss with its weight as a pair of ours."""

        def loss(
            outputs: Mapping[str, Tensor], microbatch: TensorDict
        ) -> tuple[Tensor, dict[str, Metric]]:
            return loss_fn(*self._arguments(input_, outputs, microbatch)), {}

        def weight(microbatch: TensorDict) -> float:
            return float(loss_weight_fn(_packed(input_, microbatch)))

        names = ("logits",) if self._has_logits else self.engine.output_names
        loss.required_outputs = frozenset(names)  # type: ignore[attr-defined]
        return loss, weight

    def _arguments(
        self, input_: Any, outputs: Mapping[str, Tensor], microbatch: TensorDict
    ) -> tuple[Tensor, TensorDict]:
        """What losses and hooks get: logits or values ``[N, ...]`` or scores ``[B]``, and rows."""
        mask = microbatch["attention_mask"]
        if "scores" in outputs:
            first = outputs["scores"]
        elif "values" in outputs:
            first = to_next_token(outputs["values"], mask, outputs["bootstrap_values"])[mask]
        else:
            first = to_next_token(outputs["logits"], mask)[mask]
        return first, _packed(input_, microbatch)


class InferenceEngine:
    """One of our inference engines, used as AReaL uses its own.

    Workflows of AReaL get this view as their engine; ours work too.
    """

    def __init__(self, engine: OurInferenceEngine) -> None:
        self.engine = engine
        self._loader: tuple[Any, PromptStream] | None = None
        self._filter: tuple[Any, Callable[[TensorDict], bool]] | None = None

    def initialize(self, addr: str | None, ft_spec: Any) -> None:
        self.engine.initialize(addr, finetune_spec(ft_spec))

    def destroy(self) -> None:
        self.engine.destroy()

    async def agenerate(self, req: Any) -> LLMResponse:
        """Complete one prompt; the request is one of ours or AReaL's."""
        return LLMResponse.of(await self.engine.agenerate(our_request(req)))

    # --- weights and versions -----------------------------------------------------------------

    def update_weights(self, meta: Any) -> Future[None]:
        """Begin a weight update; a meta without a version means the next one."""
        return self.engine.update_weights(weight_update_meta(meta, self.get_version() + 1))

    def set_version(self, version: int) -> None:
        self.engine.set_version(version)

    def get_version(self) -> int:
        return self.engine.get_version()

    # --- rollout ------------------------------------------------------------------------------

    def submit(self, data: dict[str, Any], workflow: Any) -> None:
        self.engine.submit(data, self._workflow(workflow))

    def wait(
        self,
        count: int,
        timeout: float | None = None,
        should_accept: Callable[..., Any] | None = None,
    ) -> TensorDict:
        return their_rows(self.engine.wait(count, timeout, self._accept(should_accept)))

    def rollout_batch(self, data: list[dict[str, Any]], workflow: Any) -> TensorDict:
        return their_rows(self.engine.rollout_batch(data, self._workflow(workflow)))

    def prepare_batch(
        self, dataloader: Any, workflow: Any, should_accept: Callable[..., Any] | None = None
    ) -> TensorDict:
        """``dataloader`` yields episodes or lists of them and starts again at its end."""
        if self._loader is None or self._loader[0] is not dataloader:
            is_ours = isinstance(dataloader, RandomAccessPrompts)
            self._loader = (dataloader, dataloader if is_ours else Episodes(dataloader))
        batch = self.engine.prepare_batch(
            self._loader[1], self._workflow(workflow), self._accept(should_accept)
        )
        return their_rows(batch)

    def pause(self) -> None:
        self.engine.pause()

    def resume(self) -> None:
        self.engine.resume()

    def _workflow(self, workflow: Any) -> OurWorkflow:
        return workflow if isinstance(workflow, OurWorkflow) else Workflow(workflow, self)

    def _accept(self, accept: Callable[..., Any] | None) -> Callable[[TensorDict], bool] | None:
        """The same filter for the same function: an episode is put before a filter once."""
        if accept is None:
            return None
        if self._filter is None or self._filter[0] is not accept:
            self._filter = (accept, lambda rows: bool(accept(their_rows(rows))))
        return self._filter[1]


class Workflow(OurWorkflow):
    """A workflow of AReaL as one of ours."""

    def __init__(self, workflow: Any, view: InferenceEngine) -> None:
        self._workflow, self._view = workflow, view

    async def arun_episode(
        self, engine: OurInferenceEngine, data: Mapping[str, Any]
    ) -> TensorDict | None:
        return our_rows(await self._workflow.arun_episode(self._view, dict(data)))


class Episodes:
    """The single episodes of a data loader that yields them in lists."""

    def __init__(self, dataloader: Any) -> None:
        self._dataloader = dataloader

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for item in self._dataloader:
            if isinstance(item, list | tuple):
                yield from item
            else:
                yield item


def _packed(input_: Any, microbatch: TensorDict) -> TensorDict:
    rows = select_rows(input_, microbatch[ROWS])
    return as_tensordict(packed_rows(rows, microbatch["attention_mask"]))
