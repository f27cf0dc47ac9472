from __future__ import annotations

import pytest
import torch

from tandem.config.schema import TrainConfig
from tandem.train import EngineRegistry
from tandem.types import FinetuneSpec
from tests.train.conftest import VOCABULARY, save_qwen3

LENGTHS = (7, 4, 9, 5)
PROMPTS = (3, 1, 4, 2)
"""Tokens of each row's prompt; the others are trained on."""


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    return save_qwen3(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture
def make_engine(model_path):
    made = []

    def make(model_type="language_model", lora=None, **config):
        config = TrainConfig(**({"device": "cpu", "max_grad_norm": None, "lr": 1e-3} | config))
        engine = EngineRegistry.new(
            model_type, "local", config=config, model_path=model_path, lora=lora
        )
        engine.initialize(ft_spec=FinetuneSpec(1, 100, 1))
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.destroy()


def make_sequences():
    """Token ids of each row, and what of them is trained on."""
    generator = torch.Generator().manual_seed(5)
    sequences = [torch.randint(VOCABULARY, (n,), generator=generator) for n in LENGTHS]
    return sequences, [torch.arange(n) >= k for n, k in zip(LENGTHS, PROMPTS, strict=True)]


@pytest.fixture
def sequences():
    return make_sequences()[0]


@pytest.fixture
def masks():
    return make_sequences()[1]


def gradients_of(engine):
    return {name: p.grad.clone() for name, p in engine.model.named_parameters()}
