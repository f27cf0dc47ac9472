"""AReaL's batches, requests and metadata in our terms and back.

AReaL's own classes are read by their attributes, so that it need not be installed. The engines are
in ``areal``, the shift by one token in ``alignment``.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from tandem import types
from tandem.errors import ConfigError, DataError
from tandem.types import FinetuneSpec, GenerationConfig, LLMRequest, SaveLoadMeta, WeightUpdateMeta

TOP_K_OFF = 100_000_000
"""AReaL's way to say that all tokens may be drawn."""

TRANSPORTS = ("inprocess", "shared_memory", "disk")

INCARNATION = uuid.uuid4().hex
"""AReaL numbers its weights alone; this tells those of one start from another's."""

# --- batches --------------------------------------------------------------------------------------


def engine_rows(input_: Any) -> TensorDict:
    """What our engine reads of an AReaL batch: ids and mask.

    The temperature stays behind: losses and hooks of AReaL divide by it themselves.
    """
    for name in ("input_ids", "attention_mask"):
        if name not in set(input_.keys()):
            raise DataError(f"{name}: missing from the batch; found: {sorted(input_.keys())}")
    fields = {
        "input_ids": input_["input_ids"].long(),
        "attention_mask": input_["attention_mask"].bool(),
    }
    return TensorDict(fields, batch_size=[fields["input_ids"].shape[0]])


def select_rows(input_: Any, index: Tensor) -> dict[str, Any]:
    """Some rows of a batch; what is not one entry a row is kept as it is."""
    num_rows = input_["input_ids"].shape[0]
    found: dict[str, Any] = {}
    for name in input_.keys():  # noqa: SIM118 (a TensorDict iterates over rows)
        value = input_[name]
        per_row = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == num_rows
        found[str(name)] = value[index.to(value.device)].to(index.device) if per_row else value
    return found


def packed_rows(rows: Mapping[str, Any], mask_BT: Tensor) -> dict[str, Any]:
    """Rows laid end to end: ``[B, T, ...]`` becomes ``[N, ...]``, the mask the rows' borders."""
    lengths = mask_BT.sum(1)
    borders = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    packed: dict[str, Any] = {"cu_seqlens": borders, "max_seqlen": int(lengths.max())}
    for name, value in rows.items():
        if name == "attention_mask":
            continue
        per_token = isinstance(value, Tensor) and value.shape[:2] == mask_BT.shape
        packed[name] = value[mask_BT] if per_token else value
    return packed


def as_tensordict(packed: Mapping[str, Any]) -> TensorDict:
    """The same as a TensorDict without batch size; what is no tensor keeps its type."""
    tensors = {name: value for name, value in packed.items() if isinstance(value, Tensor)}
    result = TensorDict(tensors, batch_size=[])
    for name in packed.keys() - tensors.keys():
        result.set_non_tensor(name, packed[name])
    return result


def pad_rows(rows: Sequence[Tensor]) -> Tensor:
    """Rows of different lengths as ``[B, longest, ...]``, zeros at their ends."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def our_rows(rows: Any) -> TensorDict | None:
    """What a workflow of AReaL returned, in our dtypes; None (rejected) stays None.

    Its workflows write token t at index t, as ours do: only their training shifts.
    """
    if rows is None:
        return None
    kinds = {
        "input_ids": torch.int64,
        "attention_mask": torch.bool,
        "loss_mask": torch.bool,
        "versions": torch.int64,
        "logprobs": torch.float32,
        "rewards": torch.float32,
    }
    fields = {
        str(name): rows[name].to(kinds[name]) if name in kinds else rows[name]
        for name in rows.keys()  # noqa: SIM118 (a TensorDict iterates over rows)
    }
    if "input_ids" not in fields:
        raise DataError(f"input_ids: missing from the rows of a workflow; found: {sorted(fields)}")
    return TensorDict(fields, batch_size=[fields["input_ids"].shape[0]])


def their_rows(batch: TensorDict) -> TensorDict:
    """Rows of our executor as AReaL's trainers read them: a loss mask to calculate with."""
    rows = batch.copy()
    rows["loss_mask"] = rows["loss_mask"].to(torch.int32)
    return rows


# --- requests -------------------------------------------------------------------------------------


class LLMResponse(types.LLMResponse):
    """Our response with AReaL's two counts."""

    __slots__ = ()

    @property
    def input_len(self) -> int:
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        return len(self.output_tokens)

    @classmethod
    def of(cls, response: types.LLMResponse) -> LLMResponse:
        values = {item.name: getattr(response, item.name) for item in dataclasses.fields(response)}
        return cls(**values)


def our_request(req: Any) -> LLMRequest:
    """Ours unchanged, AReaL's by its attributes.

    Raises:
        ConfigError: it has images, or a generation setting that we do not have.
    """
    if isinstance(req, LLMRequest):
        return req
    for name in ("image_data", "vision_msg_vllm"):
        if getattr(req, name, None):
            raise ConfigError(f"request.{name}: given, but only token ids can be completed")
    return LLMRequest(
        rid=req.rid,
        input_ids=tuple(int(token) for token in req.input_ids),
        gconfig=_generation(req.gconfig),
        metadata=dict(getattr(req, "metadata", None) or {}),
    )


def _generation(gconfig: Any) -> GenerationConfig:
    if isinstance(gconfig, GenerationConfig):
        return gconfig
    ours = {item.name for item in dataclasses.fields(GenerationConfig)}
    values: dict[str, Any] = {}
    for item in dataclasses.fields(gconfig):
        value = getattr(gconfig, item.name)
        if item.name in ours:
            values[item.name] = value
        elif value != item.default and value:
            raise ConfigError(f"gconfig.{item.name}: got {value!r}, which cannot be honoured")
    if values.get("top_k", 0) >= TOP_K_OFF:
        values["top_k"] = 0
    for name in ("stop", "stop_token_ids"):
        values[name] = values.get(name) or ()
    return GenerationConfig(**values)


# --- metadata -------------------------------------------------------------------------------------


def finetune_spec(spec: Any) -> FinetuneSpec | None:
    if spec is None or isinstance(spec, FinetuneSpec):
        return spec
    return FinetuneSpec(spec.total_train_epochs, spec.dataset_size, spec.train_batch_size)


def save_load_meta(meta: Any) -> SaveLoadMeta:
    """Ours unchanged, AReaL's by its attributes.

    Raises:
        ConfigError: an attribute that we do not have asks for something.
    """
    if isinstance(meta, SaveLoadMeta):
        return meta
    names = {item.name for item in dataclasses.fields(SaveLoadMeta)}
    for item in dataclasses.fields(meta):
        if item.name not in names and getattr(meta, item.name) not in (None, False):
            raise ConfigError(
                f"meta.{item.name}: got {getattr(meta, item.name)!r}, which cannot be honoured"
            )
    return SaveLoadMeta(**{name: getattr(meta, name) for name in names if hasattr(meta, name)})


def weight_update_meta(meta: Any, next_version: int) -> WeightUpdateMeta:
    """Ours unchanged; AReaL's names a transport and a path, its version is optional.

    Raises:
        ConfigError: a transport that we do not have, or an adapter alone.
    """
    if isinstance(meta, WeightUpdateMeta):
        return meta
    if getattr(meta, "use_lora", False):
        raise ConfigError("meta.use_lora: got True, allowed: False; adapters are sent merged")
    if meta.type not in TRANSPORTS:
        raise ConfigError(f"meta.type: got {meta.type!r}, allowed: {', '.join(TRANSPORTS)}")
    # 0, the default of some releases, was served before any update.
    version = getattr(meta, "version", None) or getattr(meta, "model_version", None)
    path = getattr(meta, "path", None)
    return WeightUpdateMeta(
        meta.type,
        version or next_version,
        incarnation=INCARNATION,
        path=None if path is None else str(path),
    )
