"""The tiny models and adapters that the kit runs on, written as Hugging Face directories.

Only transformers and peft are used here, so that nothing under test has a hand in them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Qwen3Config,
)

from tandem.models.directories import quiet_transformers

VOCABULARY = 61
MAX_POSITION = 128

AUTO_CLASSES: dict[str, Any] = {
    "language_model": AutoModelForCausalLM,
    "value_model": AutoModelForTokenClassification,
    "reward_model": AutoModelForSequenceClassification,
}
TASK_TYPES = {
    "language_model": "CAUSAL_LM",
    "value_model": "TOKEN_CLS",
    "reward_model": "SEQ_CLS",
}
"""What peft calls the model types; with a head of one number it trains the head too."""

ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_model(path: Path, model_type: str, *, tied: bool, seed: int = 0) -> Path:
    """A seeded two-layer Qwen3 of about 20,000 parameters; 4 heads, 2 key and value heads."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=MAX_POSITION,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        **({} if model_type == "language_model" else {"num_labels": 1}),
    )
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(seed)
        model = AUTO_CLASSES[model_type].from_config(config)
        model.save_pretrained(path)
    return path


def write_adapter(path: Path, model_path: Path, model_type: str, *, dropout: float) -> Path:
    """A random adapter of rank 4 on every projection, as peft writes it; it changes the outputs."""
    with quiet_transformers():
        model = AUTO_CLASSES[model_type].from_pretrained(model_path)
    config = peft.LoraConfig(
        task_type=TASK_TYPES[model_type],
        r=4,
        lora_alpha=8,
        lora_dropout=dropout,
        target_modules=list(ADAPTED),
        init_lora_weights=False,
    )
    with torch.random.fork_rng(devices=[]), quiet_peft():
        torch.manual_seed(1)
        peft.get_peft_model(model, config).save_pretrained(str(path))
    return path


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Without the warning about a name in transformers that peft still uses."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)
        yield
