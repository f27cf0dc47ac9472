"""Sequence parallelism: ranks divide the packed tokens between them, and for attention the heads.

Around attention the slices are exchanged for heads (Ulysses, arXiv 2309.14509). Who shares a
sequence is decided in ``mesh``; the slices themselves, with global positions and targets, are cut
in ``data/packing``; gradients of the slices are summed by the backend, with those of other rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tandem.data.packing import PackedRows
from tandem.errors import CapabilityError
from tandem.models.attention import AttentionContext
from tandem.models.packed import PackedContext

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies follow the largest position of a pass."""


class SequenceGroup:
    """The ranks that share each sequence; all of them must call everything here alike."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def part(self, packed: PackedRows) -> PackedRows:
        """This rank's slice of the rows."""
        return packed.part(self.rank, self.size)

    def attention(self, lengths: Sequence[int], padding: int) -> AttentionContext:
        """Attention over all slices; ``padding`` tokens at the end of the own one take no part."""
        return _HeadsForTokens(self, PackedContext(lengths), padding)

    def join(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Outputs of whole rows from those of the slices, which are 0 where others have values.

        Every rank computes the same loss from them, so the gradient of a slice is that of the
        whole and does not travel.
        """
        return {name: _Join.apply(outputs[name], self._group) for name in sorted(outputs)}

    def exchange(self, blocks: Tensor) -> Tensor:
        """Block p of ``[size, ...]`` goes to rank p; returns what came, by sender."""
        received: Tensor = _Exchange.apply(blocks, self._group)
        return received


def check_positions(model: Any) -> None:
    """Raise ``CapabilityError`` if positions mean something else in a slice than in the whole."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {value.get("rope_type") for value in (rope, *rope.values()) if isinstance(value, dict)}
    if found := [kind for kind in LENGTH_DEPENDENT if kind in kinds]:
        raise CapabilityError(
            f"{type(model).__name__}: rotary embeddings of type {', '.join(found)} depend "
            "on the length of the whole sequence, which a rank with a slice of it does not know; "
            "use train.parallel.sequence=1"
        )


class _HeadsForTokens:
    """Attention of all tokens over this rank's share of the heads."""

    def __init__(self, ranks: SequenceGroup, packed: PackedContext, padding: int) -> None:
        self._ranks, self._packed, self._padding = ranks, packed, padding

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
        size, heads = self._ranks.size, query.shape[1]
        if heads % size:
            raise CapabilityError(
                f"train.parallel.sequence: got {size}, which does not divide the {heads} attention "
                f"heads of layer {layer_idx} on each rank (train.parallel.tensor divides them "
                "first); use a divisor"
            )
        # Key and value heads that do not divide are repeated until they do.
        repeats = size // math.gcd(size, key.shape[1])
        if repeats > 1:
            key, value = (item.repeat_interleave(repeats, dim=1) for item in (key, value))
        num_tokens = query.shape[2] - self._padding
        out = self._packed.attend(
            layer_idx,
            *self._all_tokens([item[:, :, :num_tokens] for item in (query, key, value)]),
            scaling=scaling,
            sliding_window=sliding_window,
        )
        return F.pad(self._own_tokens(out), (0, 0, 0, self._padding))

    def _all_tokens(self, items: Sequence[Tensor]) -> list[Tensor]:
        """``[1, heads, n, D]`` of the own tokens to ``[1, heads / size, size n, D]`` of all."""
        size = self._ranks.size
        blocks = torch.cat([item.reshape(size, -1) for item in items], dim=1)
        received = self._ranks.exchange(blocks).split([item.numel() // size for item in items], 1)
        return [
            block.reshape(size, item.shape[1] // size, *item.shape[2:])
            .transpose(0, 1)
            .reshape(1, item.shape[1] // size, -1, item.shape[3])
            .to(item.dtype)
            for block, item in zip(received, items, strict=True)
        ]

    def _own_tokens(self, out: Tensor) -> Tensor:
        """``[1, heads / size, size n, D]`` to ``[1, heads, n, D]`` of the own tokens."""
        _, heads, num_tokens, dim = out.shape
        size = self._ranks.size
        blocks = out.reshape(heads, size, num_tokens // size, dim).transpose(0, 1)
        return self._ranks.exchange(blocks).reshape(1, size * heads, num_tokens // size, dim)


class _Exchange(torch.autograd.Function):
    """All-to-all of equal blocks, which is its own transpose."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(blocks, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grads[0], ctx.group), None


class _Join(torch.autograd.Function):
    """Sum over ranks of which each goes on alike with the whole."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = value.contiguous().clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _all_to_all(blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(blocks, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, blocks.contiguous(), group=group)
    return received
