"""One forward pass of a causal language model over packed rows, down to per-token outputs.

Only positions that predict a wanted token are projected to the vocabulary. The step loop around
this is in ``step``; attention and the chunked head themselves are in ``models``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tandem.data.packing import PackedRows, pack
from tandem.errors import CapabilityError, DataError
from tandem.models.attention import AttentionContext
from tandem.models.head import candidate_logprobs, token_logprobs
from tandem.models.heads import head_name, scalar_head
from tandem.models.invariant import ROWS
from tandem.models.packed import PackedContext

OUTPUTS: dict[str, tuple[str, ...]] = {
    "language_model": ("train_logprobs", "entropy"),
    "value_model": ("values", "bootstrap_values"),
    "reward_model": ("scores",),
}
"""What a model of each type gives.

``values[t]`` is the value of the state before token t, read where token t-1 is; no state comes
before token 0, so entry 0 is 0. ``bootstrap_values [B]`` is the value of the state after the last
token, ``scores [B]`` the score of the last token, not shifted.
"""

CANDIDATES = "candidate_logprobs"
"""``[B, T, K]`` log-probabilities of the batch's ``candidate_ids`` in the place of each token, a
further output that losses of language models may ask for."""

ROW_OUTPUTS = frozenset({"bootstrap_values", "scores"})
"""Outputs with one number a row; the others have one a token."""

LOGIT_BUFFER = 1 << 23
"""Logits that exist at a time, in elements: 32 MiB in fp32."""

Attention = Callable[[Sequence[int], int], AttentionContext]
"""Makes the attention of one pass over the segments ``lengths``; after its tokens come as many of
filler as the second argument says."""

LOGIT_CAPS = ("final_logit_softcapping", "logits_soft_cap")
ATTENTION_CAPS = ("attn_logit_softcapping",)


@dataclass(frozen=True, slots=True)
class Head:
    """The output projection: ``logits = scale * (hidden weight' + bias)``."""

    weight: Tensor
    bias: Tensor | None
    scale: float


def check_head(model: Any) -> None:
    """Raise ``CapabilityError`` if the head of ``model`` is not one that ``score`` can use."""
    is_scalar = head_name(model) is not None
    text_config = model.config.get_text_config()
    for key in ATTENTION_CAPS if is_scalar else (*LOGIT_CAPS, *ATTENTION_CAPS):
        if getattr(text_config, key, None):
            raise CapabilityError(
                f"{type(model).__name__}: config.{key}={getattr(text_config, key)} is not "
                "supported; neither attention over packed rows nor the chunked head caps logits"
            )
    if not is_scalar:
        find_head(model)


def find_head(model: Any) -> Head:
    """The output projection of ``model``.

    Raises:
        CapabilityError: there is none, or it is adapted.
    """
    name = type(model).__name__
    text_config = model.config.get_text_config()
    layer = model.get_output_embeddings()
    if type(layer) is not nn.Linear:
        raise CapabilityError(
            f"{name}: the output projection is {type(layer).__name__}, supported: a plain "
            "nn.Linear (leave lm_head out of lora.target_modules)"
        )
    multiplier = getattr(text_config, "logit_scale", None) or 1.0
    divisor = getattr(text_config, "logits_scaling", None) or 1.0
    return Head(layer.weight, layer.bias, float(multiplier) / float(divisor))


def packed_attention(lengths: Sequence[int], padding: int) -> AttentionContext:
    """Every segment sees itself; so does the filler."""
    return PackedContext((*lengths, padding) if padding else lengths)


def hidden_states(
    model: Any, packed: PackedRows, compute_dtype: torch.dtype, attention: Attention
) -> Tensor:
    """Last hidden states ``[N, H]`` of the packed rows."""
    input_ids, position_ids = packed.input_ids, packed.position_ids
    num_tokens = input_ids.shape[1]
    # Matrix products of fewer rows give a token other bits.
    if padding := max(0, ROWS - num_tokens):
        input_ids, position_ids = F.pad(input_ids, (0, padding)), F.pad(position_ids, (0, padding))
    device_type = input_ids.device.type
    is_half = compute_dtype.itemsize < 4
    with torch.autocast(device_type, compute_dtype if is_half else None, enabled=is_half):
        output = model.base_model(
            input_ids=input_ids,
            position_ids=position_ids,
            ctx=attention(packed.lengths, padding),
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
    attention: Attention = packed_attention,
) -> dict[str, Tensor]:
    """The outputs ``names`` (see ``OUTPUTS`` and ``CANDIDATES``), zero where there is none.

    ``logits`` (``[B, T, V]``, full) is a further name of language models; like every per-token
    tensor its index t speaks about token t, and it is divided by the temperature.
    """
    hidden = hidden_states(model, packed, compute_dtype, attention)
    if head_name(model) is not None:
        return _scalars(model, packed, hidden, names)
    hidden_MH = hidden[packed.sources].to(compute_dtype)
    return _token_outputs(model, packed, hidden_MH, temperature_B, names)


def _scalars(
    model: Any, packed: PackedRows, hidden: Tensor, names: Collection[str]
) -> dict[str, Tensor]:
    """Values or scores, in the precision of the head: fp32 once the engine is built."""
    if "logits" in names:
        raise DataError(f"post_hook: {type(model).__name__} has a scalar head and no logits")
    head = scalar_head(model)
    # One call for all tokens: a sharded head is gathered once.
    values_N = head(hidden.to(head.weight.dtype)).squeeze(-1)
    found: dict[str, Tensor] = {}
    for name in names:
        if name in ROW_OUTPUTS:
            found[name] = packed.last_of_rows(values_N)
        else:
            found[name] = packed.unpack(values_N[packed.sources])
    return found


def _token_outputs(
    model: Any,
    packed: PackedRows,
    hidden: Tensor,
    temperature_B: Tensor | None,
    names: Collection[str],
) -> dict[str, Tensor]:
    """Log-probabilities, entropy and logits from the hidden states ``[M, H]`` of the sources."""
    head = find_head(model)
    temperature = torch.full((len(packed.sources),), 1.0 / head.scale, device=hidden.device)
    if temperature_B is not None:
        temperature = temperature * temperature_B.to(hidden.device, torch.float32)[packed.rows]
    values: dict[str, Tensor] = {}
    if set(names) & {*OUTPUTS["language_model"], CANDIDATES}:
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
    if CANDIDATES in names:
        assert packed.candidates is not None
        values[CANDIDATES] = candidate_logprobs(
            hidden,
            head.weight,
            packed.targets,
            values["train_logprobs"],
            packed.candidates,
            temperature,
            bias_V=head.bias,
        )
    if "logits" in names:
        bias = None if head.bias is None else head.bias.to(hidden.dtype)
        logits = nn.functional.linear(hidden, head.weight.to(hidden.dtype), bias)
        values["logits"] = logits.float() / temperature[:, None]
    return {name: packed.unpack(value) for name, value in values.items() if name in names}


def check_exactness(model: Any, device: torch.device) -> None:
    """Probe that packing and the head reproduce the model's own outputs.

    Raises:
        CapabilityError: packed rows differ from rows run alone (state-space layers, say), or the
            head differs from the model's own.
    """
    ids, mask = _probe_rows(model)
    is_scalar = head_name(model) is not None
    name = "values" if is_scalar else "logits"
    with torch.no_grad():
        packed = pack(ids, mask).to(device)
        ours = score(model, packed, None, [name], compute_dtype=model.dtype)[name]
        last = (
            score(model, packed, None, ["scores"], compute_dtype=model.dtype) if is_scalar else {}
        )
        for row, length in enumerate((7, 4)):
            alone = pack(ids[row : row + 1, :length], mask[row : row + 1, :length]).to(device)
            theirs = model(
                input_ids=alone.input_ids,
                position_ids=alone.position_ids,
                ctx=PackedContext(alone.lengths),
                use_cache=False,
            ).logits[0]
            found = ours[row, 1:length]
            if is_scalar:
                found = torch.cat([found, last["scores"][row, None]])[-theirs.numel() :]
                theirs = theirs.reshape(-1)
            else:
                theirs = theirs[:-1]
            _check_close(model, found, theirs)


def _probe_rows(model: Any) -> tuple[Tensor, Tensor]:
    """Rows of 7 and 4 tokens, none of them the padding token."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, (2, 7), generator=torch.Generator().manual_seed(0))
    pad = model.config.get_text_config().pad_token_id
    if pad is not None:
        ids = torch.where(ids == pad, (pad + 1) % vocabulary, ids)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, 4:] = False
    return ids, mask


def _check_close(model: Any, ours: Tensor, theirs: Tensor) -> None:
    error = float((ours - theirs).abs().max())
    allowed = 1e-3 if model.dtype == torch.float32 else 5e-2
    if not error <= allowed * float(theirs.abs().max().clamp(min=1.0)):
        raise CapabilityError(
            f"{type(model).__name__}: packed rows through Tandem's head differ from the model's "
            f"own output by {error:.2g}; this architecture cannot be trained with packing"
        )
