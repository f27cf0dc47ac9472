"""What one rank computes of a batch whose rows were dealt; the same code on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict

from tandem.algorithms.objective import Recorder
from tandem.launch.losses import from_json
from tandem.launch.wire import Tensors
from tandem.train import TrainEngine


@dataclass(frozen=True, slots=True)
class Share:
    """How a batch is to be computed: ``function`` is a loss or a hook, by its name.

    ``records``: the log-probabilities that the loss sees are given back.
    """

    function: Mapping[str, Any] | None
    records: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "function": self.function,
            "records": self.records,
            "options": dict(self.options),
        }


def compute(
    name: str, method: Callable[..., Any], tensors: Tensors, share: Share
) -> tuple[Any, Tensors]:
    """Call the engine's ``method`` on these rows: its result, and the tensors it has for them."""
    batch = TensorDict(dict(tensors), batch_size=[len(tensors["input_ids"])])
    function = from_json(share.function)
    if name == "train_batch":
        if not share.records:
            return method(batch, function), {}
        result = method(batch, Recorder(function, batch))
        return result, {"train_logprobs": batch["prox_logprobs"]}
    if name == "forward_backward_batch":
        result = method(batch, function, **share.options)
        return result, dict(result.outputs)
    if function is None:
        result = method(batch, **share.options)
        return result, dict(result.items())
    rows = method(batch, post_hook=function, aggregate_fn=list)
    return rows, {
        str(number): torch.stack(column) for number, column in enumerate(zip(*rows, strict=True))
    }


def place_of(engine: TrainEngine) -> tuple[int, bool]:
    """Whose rows this rank computes, and whether its outputs are those that count."""
    return engine.get_data_parallel_rank(), engine.is_mp_src_rank_with_outputs()
