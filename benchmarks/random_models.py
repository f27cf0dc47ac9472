"""Qwen3 models of given sizes with random weights, as Hugging Face directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "heads": 2},
    "4m": {"vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": 4, "heads": 4},
    "42m": {"vocab_size": 32_768, "hidden_size": 512, "num_hidden_layers": 8, "heads": 8},
}
"""Half as many key-value heads as heads, a feed-forward layer three times the hidden size."""


def model_config(size: str) -> Qwen3Config:
    known = dict(SIZES[size])
    heads, hidden = known.pop("heads"), known["hidden_size"]
    return Qwen3Config(
        **known,
        intermediate_size=3 * hidden,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=hidden // heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )


def save_model(size: str, folder: Path) -> str:
    torch.manual_seed(0)
    path = folder / size
    AutoModelForCausalLM.from_config(model_config(size)).save_pretrained(path)
    return str(path)


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Token i is the word ``<i>``; 0 pads and 1 ends a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {f"<{i}>": i for i in range(vocab_size)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<0>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<0>", eos_token="<1>")


def training_flops(config: Any, lengths: list[int]) -> float:
    """Of forward and backward over rows of these lengths, causal attention counted by half.

    Every token is projected to the vocabulary except the last of its row.
    """
    hidden, layers = config.hidden_size, config.num_hidden_layers
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    matrices = hidden * (2 * queries + 2 * keys) + 3 * hidden * config.intermediate_size
    tokens, predicted = sum(lengths), sum(lengths) - len(lengths)
    products = tokens * layers * matrices + predicted * hidden * config.vocab_size
    attention = sum(layers * queries * length * length for length in lengths)
    return 6.0 * products + 6.0 * attention
