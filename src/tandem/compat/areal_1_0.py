"""The train engine as AReaL 1.0 calls it: losses get log-probabilities, not logits.

Its ``PPOActor`` and ``LMEngine`` run on this. Members that release 1.0 renamed or added and that
these use belong here; the contract that it grew from is in ``areal``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from tandem.compat import areal
from tandem.compat.alignment import to_next_token
from tandem.compat.areal_data import packed_rows, pad_rows, select_rows
from tandem.data.batch import concat_batches
from tandem.errors import CapabilityError
from tandem.train import TrainEngine as OurTrainEngine
from tandem.types import LossFn, Metric

Batch = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Rows as one padded dictionary, or a list with one such dictionary a trajectory."""


class TrainEngine(areal.TrainEngine):
    """A train engine of ours whose logits are divided by ``temperature``.

    ``loss_fn(logprobs [N], entropy [N], rows)``, with a value model ``loss_fn(values [N], rows)``;
    rows are a packed dictionary. The extremes of the logits, which AReaL only logs, are not given.
    """

    def __init__(self, engine: OurTrainEngine, *, temperature: float = 1.0) -> None:
        super().__init__(engine)
        self.temperature = temperature

    # --- names of this release ----------------------------------------------------------------

    @property
    def data_parallel_rank(self) -> int:
        return self.engine.get_data_parallel_rank()

    @property
    def data_parallel_world_size(self) -> int:
        return self.engine.get_data_parallel_size()

    @property
    def data_parallel_group(self) -> Any:
        """The process group, None with one rank."""
        return self.engine.get_data_parallel_group()

    def is_data_parallel_head(self) -> bool:
        return self.engine.is_mp_src_rank_with_outputs()

    def update_weights(self, meta: Any) -> None:
        self.upload_weights(meta)

    def optimizer_zero_grad(self) -> None:
        self.engine.optimizer_zero_grad()

    def lr_scheduler_step(self) -> None:
        self.step_lr_scheduler()

    # --- training and scoring -----------------------------------------------------------------

    def train_batch(
        self,
        input_: Batch,
        loss_fn: Callable[..., Tensor],
        loss_weight_fn: Callable[[dict[str, Any]], Any],
    ) -> dict[str, float]:
        joined = _join(input_)
        loss, weight = self._wrap(joined, loss_fn, loss_weight_fn)
        return self.engine.train_batch(self._rows(joined), loss, weight)

    @torch.no_grad()
    def eval_batch(
        self,
        input_: Batch,
        loss_fn: Callable[..., Tensor],
        loss_weight_fn: Callable[[dict[str, Any]], Any],
    ) -> Tensor:
        joined = _join(input_)
        loss, weight = self._wrap(joined, loss_fn, loss_weight_fn)
        return torch.tensor(self.engine.eval_batch(self._rows(joined), loss, weight))

    @torch.no_grad()
    def forward(  # type: ignore[override]
        self,
        input_: Batch,
        output_seqlens: list[int] | None = None,
        aggregate_fn: Callable[[list[Tensor]], Tensor] = torch.cat,
    ) -> Tensor | list[Tensor]:
        """Log-probabilities of the next token, or values, ``[B, longest]``; a list for a list."""
        joined = _join(input_)
        rows = self._rows(joined)
        mask = rows["attention_mask"]
        names = [name for name in self._outputs if name != "entropy"]
        first = _next_token(self.engine.forward(rows, outputs=names), mask)[0]
        lengths = output_seqlens or mask.sum(1).tolist()
        joined_rows = aggregate_fn(list(first.split(lengths)))
        padded = pad_rows(joined_rows.split(lengths))
        if isinstance(input_, Mapping | TensorDict):
            return padded
        parts = padded.split([len(part["input_ids"]) for part in input_])
        return [
            part[:, : source["input_ids"].shape[1]]
            for part, source in zip(parts, input_, strict=True)
        ]

    forward_batch = forward
    """The same under the name that this release gives it."""

    @property
    def _outputs(self) -> tuple[str, ...]:
        names = self.engine.output_names
        if "scores" in names:
            raise CapabilityError("AReaL 1.0 has no reward models; use a language or value model")
        return names

    def _rows(self, input_: Any) -> TensorDict:
        rows = super()._rows(input_)
        size = rows.batch_size[0]
        rows["temperature"] = torch.full((size,), self.temperature, device=rows.device)
        return rows

    def _wrap(
        self, input_: Any, loss_fn: Callable[..., Tensor], loss_weight_fn: Callable[..., Any]
    ) -> tuple[LossFn, Callable[[TensorDict], float]]:
        def loss(
            outputs: Mapping[str, Tensor], microbatch: TensorDict
        ) -> tuple[Tensor, dict[str, Metric]]:
            found = _next_token(outputs, microbatch["attention_mask"])
            return loss_fn(*found, _packed(input_, microbatch)), {}

        def weight(microbatch: TensorDict) -> float:
            return float(loss_weight_fn(_packed(input_, microbatch)))

        loss.required_outputs = frozenset(self._outputs)  # type: ignore[attr-defined]
        return loss, weight


def _next_token(outputs: Any, mask_BT: Tensor) -> list[Tensor]:
    """Packed log-probabilities and entropy, or values, in AReaL's alignment."""
    if "values" in outputs:
        last = outputs.get("bootstrap_values", None)
        return [to_next_token(outputs["values"], mask_BT, last)[mask_BT]]
    names = [name for name in ("train_logprobs", "entropy") if name in outputs]
    return [to_next_token(outputs[name], mask_BT)[mask_BT] for name in names]


def _packed(input_: Any, microbatch: TensorDict) -> dict[str, Any]:
    rows = select_rows(input_, microbatch[areal.ROWS])
    return packed_rows(rows, microbatch["attention_mask"])


def _join(input_: Batch) -> Any:
    if isinstance(input_, Mapping | TensorDict):
        return input_
    parts = [TensorDict(dict(part), batch_size=[len(part["input_ids"])]) for part in input_]
    return concat_batches(parts)
