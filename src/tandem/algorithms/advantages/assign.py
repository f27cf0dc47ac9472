"""From a batch of rewards to per-token advantages, whatever the estimator.

What belongs here: reading and writing the batch, counting trajectories once. What does not: the
formulas.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from tandem.algorithms.advantages.groups import group_rewards
from tandem.algorithms.advantages.table import (
    ADVANTAGES,
    EXTRA_INPUTS,
    TOKEN_ADVANTAGES,
    TOKEN_INPUTS,
    TOKENWISE,
)
from tandem.algorithms.tokens import under_mask
from tandem.errors import ConfigError, DataError


def check_estimator(name: str, kwargs: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` unless there is an estimator ``name`` that takes ``kwargs``."""
    estimator = ADVANTAGES.get(name) or TOKEN_ADVANTAGES.get(name)
    if estimator is None:
        allowed = ", ".join([*ADVANTAGES, *TOKEN_ADVANTAGES])
        raise ConfigError(f"algorithm.advantage: got {name!r}, allowed: {allowed}")
    parameters = inspect.signature(estimator).parameters.values()
    known = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    known -= {"reduce", *EXTRA_INPUTS.get(name, ())}
    if unknown := sorted(set(kwargs) - known):
        raise ConfigError(
            f"algorithm.advantage_kwargs.{unknown[0]}: {name} does not take it, allowed: "
            f"{', '.join(sorted(known)) or 'none'}"
        )


def assign_advantages(
    batch: TensorDict, name: str, **kwargs: Any
) -> tuple[TensorDict, dict[str, float]]:
    """A new batch with ``advantages`` float32 ``[B, T]``, 0 outside ``loss_mask``, and metrics.

    Call it with all rows of the training batch, before it is cut into optimizer steps. Rows with
    equal ``sample_ids`` are one trajectory: counted once, and they must agree in reward and group.
    A row whose reward is NaN has advantage 0, keeps its ``loss_mask`` and is counted in
    ``rewards_missing``. ``frac_reward_zero_std`` is the fraction of groups, of those with a reward,
    that carry no signal: all rewards equal, or only one. ``gae`` and ``reinforce++`` also write
    ``returns``. ``kwargs`` go to the estimator. The caller's batch is not changed.
    """
    check_estimator(name, kwargs)
    mask_BT = _get(batch, "loss_mask", name).bool()
    rows = _one_row_per_trajectory(batch)
    if name in TOKEN_ADVANTAGES:
        new = TOKEN_ADVANTAGES[name](_token_inputs(batch, name, rows), **kwargs)
    else:
        advantages_S = ADVANTAGES[name](
            _get(batch, "rewards", name).float()[rows.first_S],
            _get(batch, "group_ids", name)[rows.first_S],
            **_extra_inputs(batch, name, rows),
            **kwargs,
        )
        new = {"advantages": advantages_S[rows.index_B][:, None].expand_as(mask_BT)}
    out = batch.clone(recurse=False)
    for key, value in new.items():
        out[key] = under_mask(value, mask_BT).float().contiguous()
    return out, _reward_metrics(batch, rows)


class _Rows:
    """Which rows are one trajectory: ``first_S`` picks one row each, ``index_B`` leads back."""

    def __init__(self, sample_ids: Tensor | None, num_rows: int, device: torch.device) -> None:
        position = torch.arange(num_rows, device=device)
        if sample_ids is None:
            self.first_S = self.index_B = position
            return
        unique, self.index_B = torch.unique(sample_ids, return_inverse=True)
        start = position.new_full((unique.numel(),), num_rows)
        self.first_S = start.scatter_reduce_(0, self.index_B, position, "amin")

    @property
    def is_split(self) -> bool:
        return self.first_S.numel() < self.index_B.numel()

    def agree(self, values_B: Tensor) -> bool:
        return bool(
            torch.isclose(
                values_B.double(),
                values_B.double()[self.first_S][self.index_B],
                rtol=0.0,
                atol=0.0,
                equal_nan=True,
            ).all()
        )


def _one_row_per_trajectory(batch: TensorDict) -> _Rows:
    mask = batch["loss_mask"]
    if mask.is_nested or mask.dim() != 2:
        raise DataError(f"loss_mask: got shape {tuple(mask.shape)}, expected padded [B, T]")
    rows = _Rows(batch.get("sample_ids", None), mask.shape[0], mask.device)
    for key in ("rewards", "group_ids", "greedy_rewards"):
        values = batch.get(key, None)
        if rows.is_split and values is not None and not rows.agree(values):
            raise DataError(
                f"{key}: rows with the same sample_ids differ, expected one value for all rows of "
                "a trajectory"
            )
    return rows


def _extra_inputs(batch: TensorDict, name: str, rows: _Rows) -> dict[str, Tensor]:
    inputs: dict[str, Tensor] = {}
    for key in EXTRA_INPUTS.get(name, ()):
        if key == "lengths":
            tokens_B = batch["loss_mask"].bool().sum(dim=1)
            start = tokens_B.new_zeros(rows.first_S.numel())
            inputs[key] = start.index_add_(0, rows.index_B, tokens_B)
        else:
            inputs[key] = _get(batch, key, name)[rows.first_S]
    return inputs


def _token_inputs(batch: TensorDict, name: str, rows: _Rows) -> Mapping[str, Tensor]:
    if rows.is_split and name not in TOKENWISE:
        raise DataError(
            f"sample_ids: {name} needs every trajectory in one row, got trajectories of several "
            "rows; use an outcome-level estimator such as grpo"
        )
    return {key: batch[key] for key in TOKEN_INPUTS if key in batch}


def _get(batch: TensorDict, key: str, name: str) -> Tensor:
    value = batch.get(key, None)
    if value is None:
        found = ", ".join(sorted(map(str, batch.keys())))
        raise DataError(f"{key}: missing from the batch, required by {name}; found: {found}")
    return value


def _reward_metrics(batch: TensorDict, rows: _Rows) -> dict[str, float]:
    if "rewards" not in batch or "group_ids" not in batch:
        return {}
    groups = group_rewards(batch["rewards"].float()[rows.first_S], batch["group_ids"][rows.first_S])
    informative = torch.zeros(groups.num_groups, dtype=torch.bool, device=groups.index_B.device)
    scored = informative.clone()
    informative[groups.index_B] = groups.informative_B
    scored[groups.index_B] = groups.count_B > 0
    num_scored = int(scored.sum())
    num_flat = int((scored & ~informative).sum())
    return {
        "frac_reward_zero_std": num_flat / max(num_scored, 1),
        "rewards_missing": float((~groups.valid_B).sum()),
    }
