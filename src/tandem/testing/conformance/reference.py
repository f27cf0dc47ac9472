"""The truth: a plain Hugging Face loop. No code of any Tandem engine is used here.

A padded batch with its attention mask, ``log_softmax`` of full logits, autograd, AdamW, a scheduler
of torch's. Losses per token come from ``losses``; how they are put together is written out here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import torch
from tensordict import TensorDict
from torch import Tensor

from tandem.models.directories import quiet_transformers
from tandem.testing.conformance.models import AUTO_CLASSES, quiet_peft

Outputs = dict[str, Tensor]


class PlainModel:
    """A model of transformers in fp32 on the CPU, with peft's adapter when ``adapter`` is given."""

    def __init__(self, path: str, model_type: str, adapter: str | None = None) -> None:
        with quiet_transformers():
            self.base: Any = AUTO_CLASSES[model_type].from_pretrained(
                path, attn_implementation="eager", dtype=torch.float32
            )
        self.model_type = model_type
        self.model: Any = self.base
        if adapter is not None:
            with quiet_peft():
                self.model = peft.PeftModel.from_pretrained(self.base, adapter, is_trainable=True)
        self.model.eval()

    def parameters(self) -> dict[str, Tensor]:
        """Trainable parameters under the names they have without peft's wrapper."""
        prefix = "base_model.model." if self.model is not self.base else ""
        return {
            name.removeprefix(prefix).replace(".modules_to_save.default", ""): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }

    def logits(self, batch: TensorDict) -> Tensor:
        """``[B, T, V]`` of a right-padded batch, at each row's temperature, unshifted."""
        logits = self._run(batch).float()
        temperature = batch.get("temperature", None)
        return logits if temperature is None else logits / temperature[:, None, None]

    def outputs(self, batch: TensorDict) -> Outputs:
        """Every output of the model type; index t speaks about token t, 0 outside of rows."""
        ids, mask = batch["input_ids"], batch["attention_mask"]
        if self.model_type == "reward_model":
            return {"scores": self._run(batch).float()[:, 0]}
        if self.model_type == "value_model":
            values = self._run(batch).float()[..., 0]
            last = (mask.sum(1) - 1).clamp(min=0)
            return {
                "values": _shifted(values, mask),
                "bootstrap_values": values.gather(1, last[:, None])[:, 0],
            }
        log_p = self.logits(batch).log_softmax(-1)
        chosen = log_p[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        last = torch.zeros_like(chosen[:, :1])
        return {
            "train_logprobs": _shifted(torch.cat([chosen, last], 1), mask),
            "entropy": _shifted(entropy, mask),
        }

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        """Of ``loss`` by parameter; the graph is kept for the next one."""
        named = self.parameters()
        found = torch.autograd.grad(
            loss, list(named.values()), retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return dict(zip(named, found, strict=True))

    def _run(self, batch: TensorDict) -> Tensor:
        output: Tensor = self.model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"].long(),
            use_cache=False,
        ).logits
        return output


def _shifted(values_BT: Tensor, mask: Tensor) -> Tensor:
    """What position t says about token t + 1, at index t + 1; 0 at index 0 and at padding."""
    moved = torch.cat([torch.zeros_like(values_BT[:, :1]), values_BT[:, :-1]], dim=1)
    return torch.where(mask, moved, 0.0)


def aggregate(loss_BT: Tensor, mask_BT: Tensor, mode: str, *, horizon: float) -> Tensor:
    """The loss of a whole step from its per-token losses, each mode as its definition reads."""
    per_row = torch.where(mask_BT, loss_BT, 0.0).sum(1)
    tokens = mask_BT.sum(1)
    num_rows = (tokens > 0).sum()
    if mode == "token-mean":
        return per_row.sum() / tokens.sum()
    if mode == "token-sum":
        return per_row.sum()
    if mode == "seq-mean-token-sum":
        return per_row.sum() / num_rows
    if mode == "seq-mean-token-mean":
        return (per_row / tokens.clamp(min=1)).sum() / num_rows
    if mode == "seq-mean-token-sum-norm":
        return per_row.sum() / horizon / num_rows
    raise NotImplementedError(f"the reference has no aggregation {mode!r}")


def train(
    model: PlainModel,
    loss_of: Callable[[PlainModel], Tensor],
    *,
    steps: int,
    options: dict[str, Any],
    max_grad_norm: float | None,
    make_scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler],
) -> tuple[list[float], list[float]]:
    """Steps of a plain training loop; returns the gradient norms and the learning rates used."""
    decay = options.pop("weight_decay")
    named = model.parameters()
    groups = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], **options)
    scheduler = make_scheduler(optimizer)
    norms, rates = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        limit = float("inf") if max_grad_norm is None else max_grad_norm
        norms.append(float(torch.nn.utils.clip_grad_norm_(list(named.values()), limit)))
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return norms, rates
