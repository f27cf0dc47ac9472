"""From a model directory and a config to an ``EmbeddedCore`` that has proven itself.

Loading checkpoints strictly belongs to ``models/``; stepping belongs to ``core``.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandem.config.schema import InferenceConfig
from tandem.errors import CapabilityError, ConfigError
from tandem.inference.embedded.bits import check_bits
from tandem.inference.embedded.core import CoreOptions, EmbeddedCore
from tandem.inference.embedded.requests import ModelLimits
from tandem.models.cache import CacheContext, ChunkGroup, KVCache
from tandem.models.loading import load_causal_lm, load_tokenizer
from tandem.types import WeightVersion

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MEMORY_SHARE = 4
"""Without ``inference.cache_tokens`` the rows may fill one part in so many of the memory."""
PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}
"""Of what the tokens before it change of a token's log-probabilities. How much two kernels differ
in bfloat16 depends on the model, up to several nats for a rare token."""
LEAST_CHANGE = 0.05
"""Taken as that change where it is smaller, as in a model of random weights it may be."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def build_core(
    config: InferenceConfig,
    model_path: str,
    incarnation: str,
    *,
    tokenizer_path: str | None = None,
) -> EmbeddedCore:
    """Load the model as version 0 of ``incarnation`` and probe it.

    ``tokenizer_path`` is where the tokenizer lies when it is not in ``model_path``: its EOS ends
    completions and it finds stop strings.

    Raises:
        ConfigError: the directory, the device or ``max_context`` does not fit.
        CapabilityError: the model cannot be decoded with our cache.
    """
    model = load_causal_lm(model_path, dtype=DTYPES[config.dtype], device=_device(config))
    source = tokenizer_path or model_path
    has_tokenizer = any((Path(source) / name).is_file() for name in _TOKENIZER_FILES)
    tokenizer = load_tokenizer(source) if has_tokenizer else None
    token_bytes = probe(model, tolerance=PROBE_TOLERANCE[config.dtype])
    options = _options(config, model.device, token_bytes)
    core = EmbeddedCore(
        model,
        ModelLimits(
            vocab_size=int(model.config.get_text_config().vocab_size),
            max_context=min(_max_context(config, model), options.cache_tokens),
            eos_ids=eos_ids(model, tokenizer),
            decoder=tokenizer,
        ),
        WeightVersion(incarnation, 0),
        options,
    )
    if config.deterministic:
        check_bits(core)
    return core


def _options(config: InferenceConfig, device: torch.device, token_bytes: int) -> CoreOptions:
    memory = (
        torch.cuda.mem_get_info(device)[0]
        if device.type == "cuda"
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    return CoreOptions(
        max_batch_size=config.max_batch_size,
        cache_tokens=config.cache_tokens or max(1, memory // MEMORY_SHARE // token_bytes),
        prefix_cache_tokens=config.prefix_cache_mib * 2**20 // token_bytes,
        max_tokens_per_pass=config.max_tokens_per_pass,
        recompute_on_update=config.kv_on_update == "recompute",
        is_fast=config.numerics == "fast" or config.dtype != "float32",
        records_decoding=config.record_decoding,
    )


@torch.inference_mode()
def probe(model: PreTrainedModel, *, tolerance: float) -> int:
    """Check that decoding with the cache, beside another sequence, gives a plain pass's numbers.

    What differs is measured by what is lost when a token does not see the ones before it: both are
    means over the vocabulary and four decoded tokens. Returns the bytes of a token in the cache.

    Raises:
        CapabilityError: it does not, as for models with recurrent state.
    """
    layers = int(model.config.get_text_config().num_hidden_layers)
    vocab_size = int(model.config.get_text_config().vocab_size)
    ids = torch.arange(8, device=model.device).mul_(7).add_(1) % vocab_size
    other = ids[:3]
    whole = _prefill(model, KVCache(), [ids])[4:].log_softmax(-1)
    alone = _prefill(model, KVCache(), list(ids.split(1)))[4:].log_softmax(-1)
    cache = KVCache()
    _prefill(model, cache, [other, ids[:4]])
    pieces = []
    for position in range(4, 8):
        tokens = torch.stack([ids[position - 4], ids[position]])
        host = np.array([position - 1, position])
        positions = torch.from_numpy(host).to(model.device)
        context = CacheContext(cache, positions=host)
        pieces.append(_logits(model, tokens, positions, context)[1:])
    change = (whole - alone).abs().mean().clamp(min=LEAST_CHANGE)
    difference = ((whole - torch.cat(pieces).log_softmax(-1)).abs().mean() / change).item()
    if cache.num_layers != layers or not difference <= tolerance:
        raise CapabilityError(
            f"model type {model.config.model_type!r}: {cache.num_layers} of {layers} layers use "
            f"attention with our cache, cached log-probabilities differ by {difference:.2g} of "
            f"what the tokens before change (allowed: all layers, {tolerance:g}); the embedded "
            "engine serves decoder-only attention models"
        )
    return cache.token_bytes


def _prefill(model: PreTrainedModel, cache: KVCache, sequences: list[Tensor]) -> Tensor:
    cache.reserve([16] * len(sequences))
    groups, offset = [], 0
    for row, ids in enumerate(sequences):
        groups.append(ChunkGroup(offset, 0, len(ids), (row,)))
        offset += len(ids)
    positions = torch.cat([torch.arange(len(ids), device=model.device) for ids in sequences])
    context = CacheContext(cache, groups=groups)
    return _logits(model, torch.cat(sequences), positions, context)


def _logits(
    model: PreTrainedModel, tokens: Tensor, positions: Tensor, context: CacheContext
) -> Tensor:
    output = model(
        input_ids=tokens[None], position_ids=positions[None], use_cache=False, ctx=context
    )
    logits: Tensor = output.logits[0].float()
    return logits


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Every token that the model directory declares to end a completion."""
    declared = [model.config.eos_token_id, getattr(tokenizer, "eos_token_id", None)]
    if model.generation_config is not None:
        declared.append(model.generation_config.eos_token_id)
    found: set[int] = set()
    for item in declared:
        found.update(item if isinstance(item, list | tuple) else () if item is None else (item,))
    return tuple(sorted(found))


def _device(config: InferenceConfig) -> torch.device:
    try:
        device = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"inference.device: got {config.device!r}, which is not usable here: {error}; "
            "allowed: cpu, cuda, cuda:N, or null"
        ) from error


def _max_context(config: InferenceConfig, model: PreTrainedModel) -> int:
    own = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if config.max_context is None:
        if own is None:
            raise ConfigError(
                "inference.max_context: got null, but the model declares no limit of its own; set "
                "inference.max_context"
            )
        return int(own)
    if own is not None and config.max_context > own:
        raise ConfigError(
            f"inference.max_context: got {config.max_context}, allowed: at most the model's {own}"
        )
    return config.max_context
