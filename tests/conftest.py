"""What every test gets: one torch thread, fixed seeds, and a tiny model."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest
import torch

from tandem.config import TinyModelConfig

SEED = 20_240_229


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def tiny_model_config() -> TinyModelConfig:
    return TinyModelConfig(
        hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=64
    )


@pytest.fixture(scope="session")
def tiny_model_dir(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_config: TinyModelConfig
) -> Path:
    """A Hugging Face directory with a seeded two-layer Qwen3 and a character tokenizer."""
    from tandem.models.tiny import save_tiny_model

    return save_tiny_model(tiny_model_config, tmp_path_factory.mktemp("model") / "tiny", seed=0)
