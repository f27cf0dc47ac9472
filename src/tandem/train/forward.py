"""One forward pass of a causal language model over packed rows, down to per-token outputs.

Only positions that predict a wanted token are projected to the vocabulary. The step loop around
this is in ``step``; attention and the chunked head themselves are in ``models``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tandem.data.packing import PackedRows, pack
from tandem.errors import CapabilityError
from tandem.models.head import token_logprobs
from tandem.models.invariant import ROWS
from tandem.models.packed import PackedContext

OUTPUTS = ("train_logprobs", "entropy")

LOGIT_BUFFER = 1 << 23
"""Logits that exist at a time, in elements: 32 MiB in fp32."""

SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "attn_logit_softcapping")


@dataclass(frozen=True, slots=True)
class Head:
    """The output projection: ``logits = scale * (hidden weight' + bias)``."""

    weight: Tensor
    bias: Tensor | None
    scale: float


def find_head(model: Any) -> Head:
    """The output projection of ``model``.

    Raises:
        CapabilityError: there is none, it is adapted, or the logits are soft-capped.
    """
    name = type(model).__name__
    text_config = model.config.get_text_config()
    for key in SOFT_CAPS:
        if getattr(text_config, key, None):
            raise CapabilityError(
                f"{name}: config.{key}={getattr(text_config, key)} is not supported; "
                "soft-capped logits differ from the chunked head's"
            )
    layer = model.get_output_embeddings()
    if type(layer) is not nn.Linear:
        raise CapabilityError(
            f"{name}: the output projection is {type(layer).__name__}, supported: a plain "
            "nn.Linear (leave lm_head out of lora.target_modules)"
        )
    multiplier = getattr(text_config, "logit_scale", None) or 1.0
    divisor = getattr(text_config, "logits_scaling", None) or 1.0
    return Head(layer.weight, layer.bias, float(multiplier) / float(divisor))


def hidden_states(model: Any, packed: PackedRows, compute_dtype: torch.dtype) -> Tensor:
    """Last hidden states ``[N, H]`` of the packed rows."""
    input_ids, position_ids, lengths = packed.input_ids, packed.position_ids, packed.lengths
    num_tokens = input_ids.shape[1]
    if padding := max(0, ROWS - num_tokens):
        # A segment of filler: matrix products of fewer rows give a token other bits.
        input_ids, position_ids = F.pad(input_ids, (0, padding)), F.pad(position_ids, (0, padding))
        lengths = [*lengths, padding]
    device_type = input_ids.device.type
    with torch.autocast(device_type, compute_dtype, enabled=compute_dtype != torch.float32):
        output = model.base_model(
            input_ids=input_ids,
            position_ids=position_ids,
            ctx=PackedContext(lengths),
            use_cache=False,
        )
    return output.last_hidden_state[0, :num_tokens]


def score(
    model: Any,
    packed: PackedRows,
    temperature_B: Tensor | None,
    names: Collection[str],
    *,
    compute_dtype: torch.dtype,
) -> dict[str, Tensor]:
    """The outputs ``names`` as ``[B, T]``, zero where no token is predicted.

    ``logits`` (``[B, T, V]``, full) is the one name beside ``OUTPUTS``; like every per-token tensor
    its index t speaks about token t, and it is divided by the temperature.
    """
    head = find_head(model)
    hidden = hidden_states(model, packed, compute_dtype)[packed.sources].to(compute_dtype)
    temperature = torch.full((len(packed.sources),), 1.0 / head.scale, device=hidden.device)
    if temperature_B is not None:
        temperature = temperature * temperature_B.to(hidden.device, torch.float32)[packed.rows]
    values: dict[str, Tensor] = {}
    if set(names) & set(OUTPUTS):
        logprobs, entropy = token_logprobs(
            hidden,
            head.weight,
            packed.targets,
            temperature,
            with_entropy="entropy" in names,
            chunk=max(16, LOGIT_BUFFER // head.weight.shape[0]),
            bias_V=head.bias,
        )
        values["train_logprobs"] = logprobs
        if entropy is not None:
            values["entropy"] = entropy
    if "logits" in names:
        bias = None if head.bias is None else head.bias.to(hidden.dtype)
        logits = nn.functional.linear(hidden, head.weight.to(hidden.dtype), bias)
        values["logits"] = logits.float() / temperature[:, None]
    return {name: packed.unpack(value) for name, value in values.items() if name in names}


def check_exactness(model: Any, device: torch.device) -> None:
    """Probe that packing and the chunked head reproduce the model's own logits.

    Raises:
        CapabilityError: packed rows differ from rows run alone (state-space layers, say), or the
            chunked head differs from the model's logits.
    """
    vocabulary = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (2, 7), generator=generator)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, 4:] = False
    with torch.no_grad():
        packed = pack(ids, mask).to(device)
        ours = score(model, packed, None, ["logits"], compute_dtype=model.dtype)["logits"]
        for row, length in enumerate((7, 4)):
            alone = pack(ids[row : row + 1, :length], mask[row : row + 1, :length]).to(device)
            theirs = model(
                input_ids=alone.input_ids,
                position_ids=alone.position_ids,
                ctx=PackedContext(alone.lengths),
                use_cache=False,
            ).logits[0, :-1]
            error = float((ours[row, 1:length] - theirs).abs().max())
            allowed = 1e-3 if model.dtype == torch.float32 else 5e-2
            if not error <= allowed * float(theirs.abs().max().clamp(min=1.0)):
                raise CapabilityError(
                    f"{type(model).__name__}: logits of packed rows through the chunked head "
                    f"differ from the model's own by {error:.2g}; this architecture cannot be "
                    "trained with packing"
                )
