"""The keys of a batch, their shapes, and moving rows in and out of batches.

Checking, collating, concatenating and the two layouts (padded, jagged) belong here; cutting into
micro-batches and the next-token shift are in ``packing``.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from tandem.errors import DataError

Shape = Literal["BT", "B", "BK", "BT or B"]


@dataclass(frozen=True, slots=True)
class KeySpec:
    """What a batch key holds. ``dtype`` is what ``collate`` makes; checks compare its kind."""

    dtype: torch.dtype
    shape: Shape
    pad: int = 0


_INT, _FLOAT, _BOOL = torch.int64, torch.float32, torch.bool

KEYS: dict[str, KeySpec] = {
    "input_ids": KeySpec(_INT, "BT"),
    "attention_mask": KeySpec(_BOOL, "BT"),
    "position_ids": KeySpec(_INT, "BT"),
    "loss_mask": KeySpec(_BOOL, "BT"),
    "versions": KeySpec(_INT, "BT", pad=-1),
    "turn_ids": KeySpec(_INT, "BT"),
    "logprobs": KeySpec(_FLOAT, "BT"),
    "raw_logprobs": KeySpec(_FLOAT, "BT"),
    "train_logprobs": KeySpec(_FLOAT, "BT"),
    "ref_logprobs": KeySpec(_FLOAT, "BT"),
    "prox_logprobs": KeySpec(_FLOAT, "BT"),
    "teacher_logprobs": KeySpec(_FLOAT, "BT"),
    "entropy": KeySpec(_FLOAT, "BT"),
    "advantages": KeySpec(_FLOAT, "BT"),
    "values": KeySpec(_FLOAT, "BT"),
    "returns": KeySpec(_FLOAT, "BT"),
    "token_rewards": KeySpec(_FLOAT, "BT"),
    "loss_weights": KeySpec(_FLOAT, "BT or B"),
    "kl_loss_weights": KeySpec(_FLOAT, "BT or B"),
    "entropy_loss_weights": KeySpec(_FLOAT, "BT or B"),
    "value_loss_weights": KeySpec(_FLOAT, "BT or B"),
    "distill_loss_weights": KeySpec(_FLOAT, "BT or B"),
    "temperature": KeySpec(_FLOAT, "B"),
    "rewards": KeySpec(_FLOAT, "B"),
    "scores": KeySpec(_FLOAT, "B"),
    "reward_parts": KeySpec(_FLOAT, "BK"),
    "greedy_rewards": KeySpec(_FLOAT, "B"),
    "truncated": KeySpec(_BOOL, "B"),
    "bootstrap_values": KeySpec(_FLOAT, "B"),
    "group_ids": KeySpec(_INT, "B"),
    "sample_ids": KeySpec(_INT, "B"),
    "episode_ids": KeySpec(_INT, "B"),
    "attempt": KeySpec(_INT, "B"),
    "prox_version": KeySpec(_INT, "B"),
    "pair_ids": KeySpec(_INT, "B"),
    "is_chosen": KeySpec(_BOOL, "B"),
    "margins": KeySpec(_FLOAT, "B"),
    "ref_logprob_sums": KeySpec(_FLOAT, "B"),
    "kl_baselines": KeySpec(_FLOAT, "B"),
}

WEIGHT_KEYS = (
    "loss_weights",
    "kl_loss_weights",
    "entropy_loss_weights",
    "value_loss_weights",
    "distill_loss_weights",
)
"""Normalising weights of the loss terms, computed once per optimizer step."""


# --- checking -------------------------------------------------------------------------------------


def check_batch(batch: TensorDict, required: Collection[str] = ()) -> None:
    """Check every known key of ``batch``; keys of other names travel untouched.

    Raises:
        DataError: a required key is missing, a key is almost one of ours, or a tensor has the
            wrong kind of dtype, the wrong shape, or an attention mask with holes.
    """
    if not isinstance(batch, TensorDict) or len(batch.batch_size) != 1:
        received = tuple(batch.batch_size) if isinstance(batch, TensorDict) else type(batch)
        raise DataError(f"batch: expected a TensorDict with batch_size [B], received {received}")
    names = [str(key) for key in batch.keys()]  # noqa: SIM118 (a TensorDict iterates over rows)
    _check_names(names, required)
    ids = batch["input_ids"]
    if not ids.is_nested and "attention_mask" not in names:
        raise DataError(
            "attention_mask: missing, expected bool [B, T] beside a padded input_ids; "
            f"received keys: {', '.join(sorted(names))}"
        )
    for name in names:
        if name in KEYS:
            _check_tensor(name, batch[name], ids)
    if not ids.is_nested:
        _check_mask(batch["attention_mask"])


def _check_names(names: Sequence[str], required: Collection[str]) -> None:
    for name in names:
        if name in KEYS:
            continue
        if close := difflib.get_close_matches(name, KEYS, n=1, cutoff=0.85):
            raise DataError(f"unknown batch key {name!r}: did you mean {close[0]!r}?")
    for name in ("input_ids", *required):
        if name not in names:
            spec = KEYS.get(name)
            expected = f"{spec.dtype} [{spec.shape}]" if spec else "a tensor"
            raise DataError(
                f"{name}: missing from the batch, expected {expected}; "
                f"received keys: {', '.join(sorted(names)) or 'none'}"
            )


def _check_tensor(name: str, value: Any, ids: Any) -> None:
    spec = KEYS[name]
    if not isinstance(value, Tensor):
        raise DataError(f"{name}: expected a tensor, received {type(value).__name__}")
    if _kind(value.dtype) != _kind(spec.dtype):
        raise DataError(
            f"{name}: expected dtype {spec.dtype} (or one of its kind), received {value.dtype}"
        )
    rows = ids.shape[0]
    if value.is_nested:
        if "BT" not in spec.shape or not ids.is_nested:
            raise DataError(f"{name}: received a jagged tensor, expected [{spec.shape}]")
        if not torch.equal(_offsets(value), _offsets(ids)):
            raise DataError(f"{name}: its row lengths differ from those of input_ids")
        return
    allowed = []
    if "BT" in spec.shape and not ids.is_nested:
        allowed.append(tuple(ids.shape[:2]))
    if spec.shape == "BK":
        allowed += [(rows, value.shape[1])] if value.ndim == 2 else []
    elif spec.shape != "BT":
        allowed.append((rows,))
    if tuple(value.shape) not in allowed:
        expected = " or ".join(str(shape) for shape in allowed) or "jagged like input_ids"
        raise DataError(
            f"{name}: expected shape {expected} ({spec.shape}), received {tuple(value.shape)}"
        )


def _check_mask(mask: Tensor) -> None:
    """Every row of ``mask`` is one run of ones (padding on the left, the right, or both)."""
    if mask.shape[1] == 0:
        return
    starts = mask[:, 0].long() + (mask[:, 1:] & ~mask[:, :-1]).sum(1)
    bad = (starts > 1).nonzero().flatten().tolist()
    if bad:
        raise DataError(
            f"attention_mask: row {bad[0]} has a hole; expected one run of true values per row"
        )


def _kind(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point else "int"


# --- layouts --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layout:
    """How the caller laid out the per-token tensors of a batch."""

    offsets: Tensor | None

    def restore(self, dense: Tensor) -> Tensor:
        """A ``[B, T]`` tensor of the padded batch in the caller's layout."""
        if self.offsets is None:
            return dense
        lengths = self.offsets.diff().to(dense.device)
        inside = torch.arange(dense.shape[1], device=dense.device) < lengths[:, None]
        return torch.nested.nested_tensor_from_jagged(dense[inside], self.offsets.to(dense.device))


def to_padded(batch: TensorDict) -> tuple[TensorDict, Layout]:
    """The batch with padded per-token tensors and a mask, and the layout that it came in.

    A padded batch is returned as it is; tensors are shared with the caller's batch.
    """
    ids = batch["input_ids"]
    if not ids.is_nested:
        return batch, Layout(None)
    offsets = _offsets(ids)
    lengths = offsets.diff()
    width = int(lengths.max()) if len(lengths) else 0
    fields = {}
    for name, value in batch.items():
        nested = isinstance(value, Tensor) and value.is_nested
        # The size is given because torch pads to another one where it has not seen the lengths yet.
        size = (len(lengths), width, *value.shape[2:]) if nested else None
        fields[name] = value.to_padded_tensor(_pad_value(name), size) if nested else value
    fields["attention_mask"] = torch.arange(width, device=ids.device) < lengths[:, None]
    return TensorDict(fields, batch_size=batch.batch_size), Layout(offsets)


def _offsets(jagged: Any) -> Tensor:
    offsets: Tensor = jagged.offsets()
    return offsets


def _pad_value(name: str) -> int:
    return KEYS[name].pad if name in KEYS else 0


# --- joining --------------------------------------------------------------------------------------


def collate(rows: Sequence[Mapping[str, Tensor | float | int | bool]]) -> TensorDict:
    """One padded batch from rows: 1-D per-token tensors and per-row scalars.

    Per-token keys are padded on the right, per-row keys stacked, ``attention_mask`` made. A key of
    another name is per token when it is 1-D and as long as its row's ``input_ids``.

    Raises:
        DataError: no rows, rows with different keys, or a tensor that fits neither shape.
    """
    if not rows:
        raise DataError("collate: received no rows, expected at least one")
    names = set(rows[0]) - {"attention_mask"}
    if "input_ids" not in names:
        raise DataError(f"input_ids: missing from row 0; received keys: {sorted(names)}")
    for index, row in enumerate(rows):
        if set(row) - {"attention_mask"} != names:
            differing = sorted(names.symmetric_difference(set(row) - {"attention_mask"}))
            raise DataError(f"row {index}: keys differ from those of row 0: {differing}")
    lengths = [int(torch.as_tensor(row["input_ids"]).numel()) for row in rows]
    fields = {name: _collate_key(name, [row[name] for row in rows], lengths) for name in names}
    width = max(lengths)
    fields["attention_mask"] = torch.arange(width) < torch.tensor(lengths)[:, None]
    batch = TensorDict(fields, batch_size=[len(rows)])
    check_batch(batch)
    return batch


def _collate_key(
    name: str, values: Sequence[Tensor | float | int | bool], lengths: Sequence[int]
) -> Tensor:
    spec = KEYS.get(name)
    if all(isinstance(value, (int, float)) for value in values):
        return torch.tensor(values, dtype=spec.dtype if spec else None)
    tensors = [torch.as_tensor(value, dtype=spec.dtype if spec else None) for value in values]
    has_parts = spec is not None and spec.shape == "BK"
    if has_parts and len({tensor.shape for tensor in tensors}) > 1:
        raise DataError(f"{name}: rows differ in the number of parts, expected one for all")
    if has_parts or all(tensor.ndim == 0 for tensor in tensors):
        return torch.stack(tensors)
    for index, (tensor, length) in enumerate(zip(tensors, lengths, strict=True)):
        if tuple(tensor.shape) != (length,):
            raise DataError(
                f"row {index}, {name}: expected shape ({length},) like input_ids, or a scalar in "
                f"every row; received {tuple(tensor.shape)}"
            )
    return torch.nn.utils.rnn.pad_sequence(
        list(tensors), batch_first=True, padding_value=_pad_value(name)
    )


def concat_batches(batches: Sequence[TensorDict]) -> TensorDict:
    """The rows of all batches in order, per-token tensors padded again to the widest.

    Raises:
        DataError: no batches, different keys, or a mix of padded and jagged batches.
    """
    if not batches:
        raise DataError("concat_batches: received no batches, expected at least one")
    # Plain dicts: looking a key up in a TensorDict costs as much as a small tensor.
    fields = concat_columns([dict(batch.items()) for batch in batches])
    return TensorDict(fields, batch_size=[sum(batch.batch_size[0] for batch in batches)])


def concat_columns(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """``concat_batches`` of the columns of batches, as plain tensors."""
    names = parts[0].keys()
    for index, part in enumerate(parts):
        if part.keys() != names:
            differing = sorted(map(str, part.keys() ^ names))
            raise DataError(f"batch {index}: keys differ from those of batch 0: {differing}")
    nested = {bool(part["input_ids"].is_nested) for part in parts}
    if len(nested) > 1:
        raise DataError("concat_batches: received padded and jagged batches, expected one layout")
    if not nested.pop():
        width = max(part["input_ids"].shape[1] for part in parts)
        parts = [_widened(part, width) for part in parts]
    return {name: _cat([part[name] for part in parts]) for name in names}


def _widened(part: dict[str, Any], width: int) -> dict[str, Any]:
    old = part["input_ids"].shape[1]
    if old == width:
        return part
    fields = {}
    for name, value in part.items():
        is_wide = isinstance(value, Tensor) and value.ndim >= 2 and value.shape[1] == old
        per_token = is_wide and (name not in KEYS or KEYS[name].shape != "BK")
        if per_token:
            filled = value.new_full((value.shape[0], width, *value.shape[2:]), _pad_value(name))
            filled[:, :old] = value
            value = filled
        fields[name] = value
    return fields


def _cat(values: Sequence[Tensor]) -> Tensor:
    if isinstance(values[0], Tensor) and values[0].is_nested:
        rows = [row for value in values for row in value.unbind()]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return torch.cat(list(values))
