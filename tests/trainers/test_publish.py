"""Publishing: retries, and what is left when a run ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tandem.config import InferenceConfig, RolloutConfig
from tandem.errors import WeightSyncError
from tandem.rollout import ScriptedInferenceEngine
from tandem.trainers.publish import ATTEMPTS, publish_weights, release_weights
from tandem.types import ParamSpec, WeightUpdateMeta
from tandem.weights import publish
from tandem.weights.transports import shared_memory


class Trainer:
    """A train engine of one tensor whose stream breaks the first ``failures`` times."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.version = 0

    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        self.failures -= 1
        name = "other" if self.failures >= 0 else "weight"
        publish(meta, [ParamSpec("weight", (2,), "float32")], [(name, torch.ones(2))])

    def set_version(self, version: int) -> None:
        self.version = version


@pytest.fixture
def engine() -> Iterator[ScriptedInferenceEngine]:
    made = ScriptedInferenceEngine(RolloutConfig(min_group_size=1), incarnation="start")
    made.initialize()
    yield made
    made.destroy()
    release_weights("start")


def send(trainer: Any, engine: ScriptedInferenceEngine, version: int) -> None:
    config = InferenceConfig(transport="shared_memory")
    publish_weights(trainer, engine, version=version, incarnation="start", config=config)


def test_a_publication_that_fails_is_tried_again(engine: ScriptedInferenceEngine) -> None:
    trainer = Trainer(failures=ATTEMPTS - 1)
    send(trainer, engine, 1)
    assert engine.get_version() == trainer.version == 1


def test_one_that_keeps_failing_raises_and_the_old_version_serves_on(
    engine: ScriptedInferenceEngine,
) -> None:
    trainer = Trainer(failures=ATTEMPTS)
    with pytest.raises(WeightSyncError, match="other"):
        send(trainer, engine, 1)
    assert engine.get_version() == trainer.version == 0


def test_a_start_of_a_run_leaves_no_weights_in_shared_memory(
    engine: ScriptedInferenceEngine,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = tmp_path_factory.mktemp("shm")
    monkeypatch.setattr(shared_memory, "shared_root", lambda: root)
    send(Trainer(), engine, 1)
    assert len(list(root.iterdir())) == 1
    release_weights("start")
    assert list(root.iterdir()) == []
