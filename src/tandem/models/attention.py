"""The one place where our attention enters a Hugging Face model.

A model loaded with ``attn_implementation=ATTENTION`` calls ``ctx.attend`` in every layer, where
``ctx`` is the keyword of ``model(input_ids, position_ids=..., ctx=..., use_cache=False)``. Training
passes a ``ctx`` over packed segments, generation one over its key/value cache. No mask function is
registered, so the model builds no masks of its own; ``position_ids`` must always be given.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from tandem.errors import CapabilityError, EngineError

ATTENTION = "tandem"

UNSUPPORTED = ("softcap", "s_aux", "sinks", "position_bias", "head_mask")
"""Arguments of other architectures that change the attention weights."""


class AttentionContext(Protocol):
    """Knows which keys every query may see."""

    def attend(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
    ) -> Tensor:
        """Attention of one layer.

        ``query`` is ``[1, heads, N, D]``, ``key`` and ``value`` ``[1, kv_heads, N, D]`` after
        rotary embedding (batch and token axes as the caller laid them out). Returns the shape of
        ``query``.
        """
        ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    ctx: AttentionContext | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    if ctx is None:
        raise EngineError(
            "the model was called without ctx; pass ctx=PackedContext(...) or a cache context"
        )
    asked = [name for name in UNSUPPORTED if options.get(name) is not None]
    if asked:
        raise CapabilityError(
            f"{type(module).__name__} asks its attention for {', '.join(asked)}, which neither "
            "training nor the embedded engine supports; use another architecture"
        )
    out = ctx.attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        query,
        key,
        value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
    )
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention)
