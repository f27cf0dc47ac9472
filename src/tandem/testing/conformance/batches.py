"""Rows for the checks, their weights, and which rank gets which of them.

Everything is drawn from seeds, so that all ranks know the whole batch and take their part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from tandem.algorithms.aggregation import loss_weights
from tandem.data.batch import collate
from tandem.testing.conformance.models import VOCABULARY

LENGTHS = (3, 9, 5, 7, 20, 1, 14, 2, 6, 4, 11, 8)
"""Lengths of the usual batch: six pairs, one row without a prediction, uneven sums."""

WEIGHTS = ("loss_weights", "kl_loss_weights", "entropy_loss_weights", "value_loss_weights")
HORIZON = 16.0


def make_batch(lengths: Sequence[int] = LENGTHS, *, seed: int = 0) -> TensorDict:
    """Rows with the keys that any loss of the kit reads, without weights.

    About two thirds of each row are trained on; the padding token 0 occurs in no row.
    """
    generator = torch.Generator().manual_seed(seed)
    rows: list[dict[str, Any]] = []
    for number, length in enumerate(lengths):
        noise = torch.randn(7, length, generator=generator)
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator)
        mask = torch.arange(length) >= max(1, length // 3)
        rows.append(
            {
                "input_ids": ids,
                "loss_mask": mask,
                "advantages": noise[0].sign() * (0.5 + noise[0].abs()),
                "prox_noise": 0.2 * noise[1],
                "ref_noise": 0.3 * noise[2],
                "old_noise": 0.2 * noise[3],
                "returns": noise[4],
                "cov_selected": noise[5] > 0.5,
                "target": float(noise[6, 0]),
                "temperature": 0.7 + 0.1 * (number % 7),
                "group_ids": number // 2,
            }
        )
    return collate(rows)


def with_truth(batch: TensorDict, outputs: dict[str, Tensor]) -> TensorDict:
    """The batch with the log-probabilities and values that losses compare with, near the truth."""
    found = batch.clone()
    if "train_logprobs" in outputs:
        truth = outputs["train_logprobs"].detach()
        found["prox_logprobs"] = truth + batch["prox_noise"]
        found["ref_logprobs"] = truth + batch["ref_noise"]
    if "values" in outputs:
        found["old_values"] = outputs["values"].detach() + batch["old_noise"]
    return found


def with_weights(batch: TensorDict, mode: str, *, per_row: bool = False) -> TensorDict:
    """The whole step's batch with its weights: of tokens by ``mode``, or of rows, all alike."""
    found = batch.clone()
    if per_row:
        rows = batch.batch_size[0]
        found["loss_weights"] = torch.full((rows,), 1.0 / rows)
        return found
    weights = loss_weights(mode, batch["loss_mask"], horizon=HORIZON)
    for key in WEIGHTS:
        found[key] = weights
    return found


def shard_rows(num_rows: int, rank: int, size: int, *, uneven: bool = False) -> list[int]:
    """Rows of one data-parallel rank; pairs stay together.

    ``uneven`` gives rank 0 all rows but one pair for each other rank.
    """
    pairs = [list(range(start, min(start + 2, num_rows))) for start in range(0, num_rows, 2)]
    if len(pairs) < size:
        raise ValueError(f"{num_rows} rows are too few for {size} ranks")
    if not uneven:
        mine = pairs[rank::size]
    else:
        first = len(pairs) - (size - 1)
        mine = pairs[:first] if rank == 0 else [pairs[first + rank - 1]]
    return [row for pair in mine for row in pair]


def take(batch: TensorDict, rows: Sequence[int]) -> TensorDict:
    return batch[torch.tensor(rows, dtype=torch.int64)]


def left_padded(batch: TensorDict, *, extra: int = 3) -> TensorDict:
    """The same rows moved to the right end of rows that are ``extra`` tokens wider."""
    lengths = batch["attention_mask"].sum(1).tolist()
    width = batch["input_ids"].shape[1]
    found = {}
    for name, value in batch.items():
        if value.ndim < 2:
            found[name] = value
            continue
        wide = value.new_zeros((value.shape[0], width + extra))
        for row, length in enumerate(lengths):
            if length:
                wide[row, -length:] = value[row, :length]
        found[name] = wide
    return TensorDict(found, batch_size=batch.batch_size)


def jagged(batch: TensorDict) -> TensorDict:
    """The same rows as nested tensors, without a mask."""
    mask = batch["attention_mask"]
    lengths = mask.sum(1)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    found = {}
    for name, value in batch.items():
        if name == "attention_mask":
            continue
        is_per_token = value.ndim == 2
        found[name] = (
            torch.nested.nested_tensor_from_jagged(value[mask], offsets) if is_per_token else value
        )
    return TensorDict(found, batch_size=batch.batch_size)
