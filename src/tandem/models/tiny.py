"""Tiny models built from a config, with a character tokenizer; nothing is downloaded.

What belongs here: turning a ``TinyModelConfig`` and a seed into a Hugging Face directory. Loading
such a directory, like any other, is done in ``loading.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from tandem.config.schema import TinyModelConfig
from tandem.errors import ConfigError
from tandem.models.directories import new_directory, quiet_transformers

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
RECORD = "tandem_tiny.json"
_ARCHITECTURES: dict[str, type[PreTrainedConfig]] = {"qwen3": Qwen3Config, "llama": LlamaConfig}


def character_tokenizer(alphabet: str, *, max_length: int = 512) -> PreTrainedTokenizerBase:
    """One token per character of ``alphabet``, after the four ``SPECIAL_TOKENS``.

    ``decode(encode(text)) == text`` for every text over the alphabet, spaces and newlines included;
    neither BOS nor EOS is added.

    Raises:
        ConfigError: the alphabet is empty or names a character twice.
    """
    repeated = sorted({char for char in alphabet if alphabet.count(char) > 1})
    if not alphabet or repeated:
        raise ConfigError(
            f"model.tiny.alphabet: got {alphabet!r}, allowed: at least one character, none twice"
            + (f" (repeated: {', '.join(map(repr, repeated))})" if repeated else "")
        )
    tokens = (*SPECIAL_TOKENS, *alphabet)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )


def save_tiny_model(config: TinyModelConfig, target: Path, *, seed: int) -> Path:
    """Build the model with weights drawn from ``seed`` and save it as a Hugging Face directory.

    A directory that already holds exactly this model (same config, same seed) is left alone, any
    other is an error. The global random state is neither read nor changed.

    Raises:
        ConfigError: sizes that do not fit together, or ``target`` holds something else.
    """
    record = {"config": config.model_dump(mode="json"), "seed": seed}
    if target.exists():
        if _read_record(target / RECORD) == record:
            return target
        raise ConfigError(
            f"model directory {str(target)!r} exists and holds another model; "
            "choose another run name or remove it"
        )
    tokenizer = character_tokenizer(config.alphabet, max_length=config.max_position)
    hf_config = _model_config(config, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with quiet_transformers(), new_directory(target) as staging:
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        (staging / RECORD).write_text(json.dumps(record, indent=2), encoding="utf-8")
    return target


def _model_config(config: TinyModelConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    head_dim, rest = divmod(config.hidden_size, config.num_heads)
    if rest or head_dim % 2:
        raise ConfigError(
            f"model.tiny.hidden_size: got {config.hidden_size}, allowed: a multiple of "
            f"2 * num_heads ({2 * config.num_heads})"
        )
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"model.tiny.num_kv_heads: got {config.num_kv_heads}, allowed: a divisor of "
            f"num_heads ({config.num_heads})"
        )
    return _ARCHITECTURES[config.architecture](
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=head_dim,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_position,
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _read_record(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
