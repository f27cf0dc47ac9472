"""Our engines under code of other projects, each in an environment of its own: ``make test-peers``.

A file is collected where its project is installed, so the usual suite sees none of them.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from importlib.machinery import ModuleSpec

import pytest
import torch

from tandem.config.schema import TrainConfig
from tandem.data.batch import collate
from tandem.train import EngineRegistry
from tandem.types import FinetuneSpec
from tests.train.conftest import VOCABULARY, save_qwen3

collect_ignore = [
    f"test_{name}.py" for name in ("verl", "areal", "trl") if importlib.util.find_spec(name) is None
]

if importlib.util.find_spec("areal") is not None:
    # Its logger imports them, these tests never log, and their pins fight with ours.
    for tracker in ("swanlab", "trackio"):
        sys.modules[tracker] = types.ModuleType(tracker)
        sys.modules[tracker].__spec__ = ModuleSpec(tracker, None)

os.environ.setdefault("VERL_PLATFORM", "cpu")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("WANDB_MODE", "disabled")

LENGTHS = (7, 4, 9, 5)
PROMPTS = (3, 1, 4, 2)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    return save_qwen3(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture
def make_engine(model_path):
    made = []

    def make(model_type="language_model", **config):
        config = TrainConfig(**({"device": "cpu", "max_grad_norm": None, "lr": 1e-3} | config))
        engine = EngineRegistry.new(model_type, "local", config=config, model_path=model_path)
        engine.initialize(ft_spec=FinetuneSpec(1, 100, 1))
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.destroy()


@pytest.fixture
def batch():
    """Rows with what any loss may want. The first response token's mask is off in two rows."""
    generator = torch.Generator().manual_seed(11)
    rows = []
    for n, k in zip(LENGTHS, PROMPTS, strict=True):
        mask = torch.arange(n) >= k + (n % 2 == 0)
        noise = {
            name: torch.randn(n, generator=generator) * scale
            for name, scale in (
                ("advantages", 1.0),
                ("prox_logprobs", 0.5),
                ("logprobs", 0.3),
                ("ref_logprobs", 0.3),
                ("values", 0.5),
                ("returns", 1.0),
            )
        }
        rows.append(
            {
                "input_ids": torch.randint(VOCABULARY, (n,), generator=generator),
                "loss_mask": mask,
                **noise,
            }
        )
    return collate(rows)


def near_policy(batch, engine, *names):
    """Turn the noise under ``names`` into log-probabilities close to the policy's own."""
    own = engine.forward(batch.select("input_ids", "attention_mask"))["train_logprobs"]
    for name in names:
        batch[name] = own + batch[name]
    return batch


def gradients_of(engine):
    return {name: p.grad.clone() for name, p in engine.model.named_parameters()}


def assert_same_gradients(found, expected):
    """Within 1e-5 of the whole gradient's norm, element by element."""
    norm = torch.stack([g.square().sum() for g in expected.values()]).sum().sqrt()
    assert set(found) == set(expected)
    assert float(norm) > 1e-3
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max()) <= 1e-5 * float(norm), name
