"""Models by type: a causal language model, or one with a scalar head for values or scores.

What belongs here: loading a model of a given type from any Hugging Face directory, and finding its
head. What the head's numbers mean, token by token, is decided in ``train/forward``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from tandem.errors import CapabilityError
from tandem.models.loading import check_complete, load_causal_lm, load_pretrained

log = logging.getLogger(__name__)

SCALAR_CLASSES: dict[str, Any] = {
    "value_model": AutoModelForTokenClassification,
    "reward_model": AutoModelForSequenceClassification,
}
"""The class of transformers, with one label, that reads what ``save`` writes for a model type."""

HEAD_NAMES = ("score", "classifier")


def load_model(
    model_type: str,
    path: str,
    *,
    dtype: torch.dtype,
    device: str | torch.device,
    seed: int | None = None,
) -> PreTrainedModel:
    """A model of ``model_type`` in eval mode, from a directory with or without a scalar head.

    A head that the directory lacks is drawn from ``seed``, the same on every rank; ``None`` demands
    a saved one. A head without a bias gets one of 0 where the class has a bias.

    Raises:
        ConfigError: not a Hugging Face directory, or an architecture without such a head.
        CapabilityError: the head is more than one linear layer.
        DataError: tensors of the file and of the architecture differ (all names are listed).
    """
    if model_type == "language_model":
        return load_causal_lm(path, dtype=dtype, device=device)
    with torch.random.fork_rng(devices=[]):
        model, info = load_pretrained(SCALAR_CLASSES[model_type], path, dtype=dtype, num_labels=1)
    name = head_name(model)
    if name is None:
        raise CapabilityError(
            f"{type(model).__name__}: the head is not one linear layer named "
            f"{' or '.join(HEAD_NAMES)}; model type {model_type} needs that"
        )
    head = getattr(model, name)
    missing = set(info["missing_keys"])
    expected = {f"{name}.bias"} if head.bias is not None else set()
    if f"{name}.weight" in missing and seed is not None:
        log.info("%s has no scalar head: starting from a new one (seed %d)", path, seed)
        _draw(head, seed)
        expected |= {f"{name}.weight"}
        info = {**info, "unexpected_keys": _without_lm_head(info)}
    elif f"{name}.bias" in missing:
        nn.init.zeros_(head.bias)
    check_complete(path, {**info, "missing_keys": missing - expected})
    model.config.use_cache = False
    return model.to(device).eval()


def task_type(model: Any) -> str:
    """What an adapter file calls the kind of ``model``."""
    name = type(model).__name__
    if name.endswith("ForSequenceClassification"):
        return "SEQ_CLS"
    return "TOKEN_CLS" if name.endswith("ForTokenClassification") else "CAUSAL_LM"


def head_name(model: Any) -> str | None:
    """Name of the scalar head, or None where there is none, as in a language model."""
    for name in HEAD_NAMES:
        layer = getattr(model, name, None)
        if isinstance(layer, nn.Linear) and layer.out_features == 1:
            return name
    return None


def scalar_head(model: Any) -> nn.Linear:
    """The layer that turns a hidden state into one number."""
    name = head_name(model)
    if name is None:
        raise CapabilityError(f"{type(model).__name__} has no scalar head")
    head: nn.Linear = getattr(model, name)
    return head


def head_parameters(model: Any) -> dict[str, nn.Parameter]:
    """Parameters of the scalar head by name; empty for a language model."""
    name = head_name(model)
    if name is None:
        return {}
    return {f"{name}.{key}": value for key, value in getattr(model, name).named_parameters()}


def pad_apart_from_end(model: Any, config: Any) -> None:
    """Drop a padding token of ``config`` with which transformers would score the wrong token.

    Its sequence classifiers read the last token that is not padding, so an end token that pads too
    is skipped in silence. Without a padding token they score single rows right and refuse others.
    """
    text_config = config.get_text_config()
    ends = text_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    if task_type(model) == "SEQ_CLS" and text_config.pad_token_id in ends:
        if text_config.pad_token_id is not None:
            log.warning(
                "the padding token is the end token: saved without pad_token_id, because "
                "transformers would score the token before the end"
            )
        text_config.pad_token_id = None


def _draw(head: nn.Linear, seed: int) -> None:
    """Weights of variance ``1 / (H + 1)`` (arXiv 2009.01325), bias 0."""
    generator = torch.Generator().manual_seed(seed)
    std = (head.in_features + 1) ** -0.5
    weight: Tensor = torch.randn(head.weight.shape, generator=generator) * std
    with torch.no_grad():
        head.weight.copy_(weight)
        if head.bias is not None:
            head.bias.zero_()


def _without_lm_head(info: Mapping[str, Any]) -> list[str]:
    return [name for name in info["unexpected_keys"] if not name.startswith("lm_head.")]
