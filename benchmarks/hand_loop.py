"""A training step as one writes it by hand: plain ``transformers`` with sdpa, AdamW, clipping.

Needs torch and ``transformers`` only, so that it runs beside a peer in the peer's own environment.
Rows are padded on the right, in the micro-batches it is given, or laid end to end with a
block-diagonal mask. Every token after the first of its row is trained on, token-mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

LR, MAX_NORM = 1e-5, 1.0


class HandLoop:
    """Model and optimizer; ``step(rows, plan)`` is one optimizer step."""

    def __init__(self, model_path: str, *, bfloat16: bool) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=torch.float32, attn_implementation="sdpa"
        ).train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LR, weight_decay=0.0, fused=True
        )
        self.bfloat16 = bfloat16

    def step_padded(self, rows: Sequence[Tensor], plan: Sequence[Sequence[int]]) -> float:
        return self._step(rows, [self._padded([rows[i] for i in part]) for part in plan])

    def step_packed(self, rows: Sequence[Tensor], plan: Sequence[Sequence[int]]) -> float:
        return self._step(rows, [self._packed([rows[i] for i in part]) for part in plan])

    def _step(self, rows: Sequence[Tensor], batches: Sequence[dict[str, Tensor]]) -> float:
        num_trained = sum(len(row) - 1 for row in rows)
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for batch in batches:
            labels = batch.pop("labels")
            with torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16):
                logits = self.model(**batch, use_cache=False).logits
            loss = cross_entropy(
                logits[:, :-1].flatten(0, 1).float(),
                labels[:, 1:].flatten(),
                ignore_index=-100,
                reduction="sum",
            )
            loss = loss / num_trained
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        return total

    def _padded(self, rows: Sequence[Tensor]) -> dict[str, Tensor]:
        width = max(len(row) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        labels = torch.full_like(ids, -100)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = labels[number, : len(row)] = row
            mask[number, : len(row)] = 1
        batch = {"input_ids": ids, "labels": labels}
        # Without padding sdpa takes its fast causal path.
        return batch if bool(mask.all()) else batch | {"attention_mask": mask}

    def _packed(self, rows: Sequence[Tensor]) -> dict[str, Tensor]:
        segment = torch.repeat_interleave(
            torch.arange(len(rows)), torch.tensor([len(row) for row in rows])
        )
        same = segment[:, None] == segment[None, :]
        allowed = torch.ones_like(same).tril() & same
        dtype = torch.bfloat16 if self.bfloat16 else torch.float32
        mask = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, float("-inf"))
        labels = torch.cat([torch.cat([row.new_full((1,), -100), row[1:]]) for row in rows])
        return {
            "input_ids": torch.cat(list(rows))[None],
            "labels": labels[None],
            "position_ids": torch.cat([torch.arange(len(row)) for row in rows])[None],
            "attention_mask": mask[None, None],
        }
