"""A verl batch on its way through our step loop, and what comes back in verl's layout.

Reading settings, cutting as they say, and translating outputs belong here; the engine's methods are
in ``verl``, the shift by one token in ``alignment``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from tandem.compat.alignment import to_next_token
from tandem.data.batch import to_padded
from tandem.data.packing import cut_microbatches
from tandem.errors import CapabilityError, DataError
from tandem.types import Metric

ROWS = "verl_rows"
"""Key of the row numbers that travel with a micro-batch, to find the caller's rows again."""

NAMES = {
    "train_logprobs": "log_probs",
    "entropy": "entropy",
    "values": "values",
    "scores": "scores",
}
"""Our outputs by the names they have in verl's ``model_output``."""


class VerlBatch:
    """The caller's batch, its settings, and the padded batch that our engine runs.

    ``data`` is a shallow copy with ``batch_num_tokens`` over all data-parallel ranks.
    """

    def __init__(
        self,
        data: TensorDict,
        output_names: Sequence[str],
        sum_over_ranks: Callable[[float], float],
        agree_max: Callable[[int], int],
    ) -> None:
        names = {str(name) for name in data.keys()}  # noqa: SIM118
        self.is_jagged = "input_ids" in names and bool(data["input_ids"].is_nested)
        for name in ("input_ids", *(() if self.is_jagged else ("attention_mask",))):
            if name not in names:
                raise DataError(f"{name}: missing from the batch; found: {sorted(names)}")
        self.data = data.copy()
        self._agree_max = agree_max
        self.rows = self._engine_rows()
        self.outputs = self._wanted(output_names)
        self.losses: list[float] = []
        self.metrics: dict[str, Any] = {}
        if "loss_mask" in names:
            count = sum_over_ranks(float(_flat(data["loss_mask"]).sum()))
            self.data.set_non_tensor("batch_num_tokens", int(count))

    def setting(self, key: str, default: Any) -> Any:
        """A non-tensor entry, or the default where it is absent."""
        return self.data[key] if key in self.data.keys() else default  # noqa: SIM118

    def _wanted(self, output_names: Sequence[str]) -> tuple[str, ...]:
        if "train_logprobs" not in output_names:
            return tuple(output_names)
        with_entropy = bool(self.setting("calculate_entropy", False))
        return ("train_logprobs", "entropy") if with_entropy else ("train_logprobs",)

    def _engine_rows(self) -> TensorDict:
        """What our engine reads of the batch, padded. Every row counts: verl's losses see all."""
        ids = self.data["input_ids"]
        num_rows = ids.shape[0]
        fields: dict[str, Tensor] = {"input_ids": ids.long()}
        if not self.is_jagged:
            fields["attention_mask"] = self.data["attention_mask"].bool()
        positions = self.data.get("position_ids", None)
        if positions is not None:
            if positions.dim() != 2:
                raise CapabilityError(
                    f"position_ids: {positions.dim()} dimensions, supported: one position a token"
                )
            fields["position_ids"] = positions.long()
        temperature = torch.as_tensor(self.setting("temperature", 1.0), dtype=torch.float32)
        if temperature.numel() not in (1, num_rows):
            raise DataError(
                f"temperature: got {temperature.numel()} numbers, expected 1 or {num_rows}"
            )
        fields["temperature"] = temperature.reshape(-1).expand(num_rows).to(ids.device)
        fields["loss_weights"] = torch.ones(num_rows, device=ids.device)
        fields[ROWS] = torch.arange(num_rows, device=ids.device)
        return to_padded(TensorDict(fields, batch_size=[num_rows]))[0]

    # --- cutting ------------------------------------------------------------------------------

    def microbatches(self) -> list[list[int]]:
        """Row numbers of each micro-batch as the settings ask; the engine may cut them further.

        ``use_dynamic_bsz`` (verl's default) goes by ``max_token_len_per_gpu``, else
        ``micro_batch_size_per_gpu`` counts rows; ``force_group_size`` rows stay together. Without
        these there is one.
        """
        num_rows = len(self.rows[ROWS])
        together = int(self.setting("force_group_size", 1))
        if self.setting("use_dynamic_bsz", True):
            cap = self.setting("max_token_len_per_gpu", None)
            if cap is None:
                return [list(range(num_rows))]
            return cut_microbatches(
                self.rows["attention_mask"].sum(1).tolist(),
                max_tokens=int(cap),
                groups=[row // together for row in range(num_rows)],
                agree=self._agree_max,
            )
        size = self.setting("micro_batch_size_per_gpu", None)
        if size is None:
            return [list(range(num_rows))]
        size = int(size) * together
        parts = [
            list(range(start, min(start + size, num_rows))) for start in range(0, num_rows, size)
        ]
        return parts + [[] for _ in range(self._agree_max(len(parts)) - len(parts))]

    def select(self, rows: Sequence[int]) -> TensorDict:
        """The engine's batch of these rows."""
        return self.rows[torch.tensor(rows, dtype=torch.int64, device=self.rows[ROWS].device)]

    # --- the loss -----------------------------------------------------------------------------

    def loss(self, loss_function: Callable[..., Any], group: Any) -> VerlLoss:
        return VerlLoss(self, loss_function, group)

    def note(self, loss: float, metrics: Mapping[str, Any]) -> None:
        """Keep what one call of the loss gave, in lists, as verl does."""
        self.losses.append(loss)
        for name, value in metrics.items():
            if name not in self.metrics:
                self.metrics[name] = value.init_list() if hasattr(value, "init_list") else []
            add = self.metrics[name].extend if isinstance(value, list) else None
            (add or self.metrics[name].append)(value)

    def model_output(
        self, outputs: Mapping[str, Tensor], mask_BT: Tensor, rows: TensorDict
    ) -> dict[str, Tensor]:
        """Our outputs under verl's names, in its alignment and the layout of its ``rows``.

        Padded batches with ``responses`` get the responses' part alone.
        """
        result = {}
        for name, values in outputs.items():
            if name not in NAMES:
                continue
            if values.ndim > 1:
                last = outputs.get("bootstrap_values") if name == "values" else None
                values = self._lay_out(to_next_token(values, mask_BT, last), mask_BT, rows)
            result[NAMES[name]] = values
        return result

    def _lay_out(self, shifted_BT: Tensor, mask_BT: Tensor, rows: TensorDict) -> Tensor:
        if self.is_jagged:
            offsets = rows["input_ids"].offsets()
            return torch.nested.nested_tensor_from_jagged(shifted_BT[mask_BT], offsets)
        if "responses" in rows.keys():  # noqa: SIM118
            return shifted_BT[:, -rows["responses"].shape[1] - 1 : -1]
        return shifted_BT


class VerlLoss:
    """A loss of verl as one of ours: called with the caller's rows, its result noted."""

    def __init__(self, batch: VerlBatch, loss_function: Callable[..., Any], group: Any) -> None:
        self._batch, self._loss_function, self._group = batch, loss_function, group
        self.required_outputs = frozenset(batch.outputs)

    def __call__(
        self, outputs: Mapping[str, Tensor], microbatch: TensorDict
    ) -> tuple[Tensor, dict[str, Metric]]:
        batch = self._batch
        rows = select_rows(batch.data, microbatch[ROWS].tolist()).to(microbatch[ROWS].device)
        loss, metrics = self._loss_function(
            model_output=batch.model_output(outputs, microbatch["attention_mask"], rows),
            data=rows,
            dp_group=self._group,
        )
        batch.note(float(loss.detach()), metrics)
        # verl multiplies by the number of ranks, because its gradients are averaged over them.
        return loss / batch.setting("dp_size", 1), {}


def collect(
    batch: VerlBatch, results: Sequence[tuple[Sequence[int], Mapping[str, Tensor]]]
) -> dict[str, Any]:
    """The outputs of all micro-batches in the order of the batch, losses and metrics in lists."""
    mask = batch.rows["attention_mask"]
    full: dict[str, Tensor] = {}
    for rows, outputs in results:
        index = torch.tensor(rows, dtype=torch.int64, device=mask.device)
        for name, values in outputs.items():
            shape = mask.shape if values.ndim > 1 else mask.shape[:1]
            target = full.setdefault(name, values.new_zeros(shape, device=mask.device))
            target.index_copy_(0, index, values.to(mask.device))
    return {
        "model_output": batch.model_output(full, mask, batch.data),
        "loss": batch.losses,
        "metrics": batch.metrics,
    }


def select_rows(data: TensorDict, rows: Sequence[int]) -> TensorDict:
    """Some rows of a batch that may hold jagged tensors and non-tensor entries.

    Jagged tensors of equal row lengths share their offsets, so that they can be combined.
    """
    ids = data["input_ids"]
    index = torch.tensor(rows, dtype=torch.int64, device=ids.device)
    offsets = None
    fields: dict[str, Any] = {}
    for name, value in sorted(data.items(), key=lambda item: item[0] != "input_ids"):
        if isinstance(value, NonTensorData):
            fields[name] = NonTensorData(value.data, batch_size=[len(rows)])
        elif isinstance(value, NonTensorStack):
            fields[name] = NonTensorStack(*[value[row] for row in rows])
        elif isinstance(value, Tensor) and value.is_nested:
            every = value.unbind()
            picked = [every[row] for row in rows]
            chosen: Any = torch.nested.as_nested_tensor(picked, layout=torch.jagged)
            if offsets is not None and torch.equal(chosen.offsets(), offsets):
                chosen = torch.nested.nested_tensor_from_jagged(chosen.values(), offsets)
            elif offsets is None and name == "input_ids":
                offsets = chosen.offsets()
            fields[name] = chosen
        else:
            fields[name] = value[index]
    return TensorDict(fields, batch_size=[len(rows)])


def _flat(values: Tensor) -> Tensor:
    return values.values() if values.is_nested else values
