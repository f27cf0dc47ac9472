"""Models that only score: reward model and teacher. They are opened and checked here.

What is asked of them stands where it is used: ``rl_rewards``, ``rl_learner``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tandem.config import FrozenModelConfig, TrainConfig
from tandem.errors import ConfigError
from tandem.launch import open_engine
from tandem.models.loading import load_tokenizer
from tandem.train import TrainEngine


def open_frozen(config: FrozenModelConfig, model_type: str, *, seed: int) -> TrainEngine:
    """An engine of ``model_type`` that nobody trains."""
    train = TrainConfig(
        lr=0.0,
        backend=config.backend,
        device=config.device,
        dtype=config.dtype,
        max_tokens_per_microbatch=config.max_tokens_per_microbatch,
        offload_params=config.offload_params,
    )
    return open_engine(model_type, train, model_path=config.path, seed=seed)


def check_vocabulary(path: str, tokenizer: Any, field: str) -> None:
    """Raise ``ConfigError`` unless the model in ``path`` reads the policy's token ids as it does.

    Rows are scored by their ids; text is never tokenised again.
    """
    theirs, ours = load_tokenizer(path).get_vocab(), tokenizer.get_vocab()
    if theirs == ours:
        return
    differing = sorted(t for t in {*theirs, *ours} if theirs.get(t) != ours.get(t))
    raise ConfigError(
        f"{field}: the vocabulary in {path!r} differs from the policy's in {len(differing)} tokens "
        f"({', '.join(map(repr, differing[:3]))}, …); it scores token ids, so both must be equal"
    )


def check_scores(path: str, field: str) -> None:
    """Raise ``ConfigError`` unless the directory ``path`` holds a model that scores responses."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ConfigError(f"{field}: got {path!r}, expected a Hugging Face directory")
    names = json.loads(file.read_text(encoding="utf-8")).get("architectures") or []
    if not any(name.endswith("ForSequenceClassification") for name in names):
        raise ConfigError(
            f"{field}: {path!r} holds {', '.join(names) or 'no known architecture'}, which has no "
            "score; train a reward model with 'tandem reward'"
        )
