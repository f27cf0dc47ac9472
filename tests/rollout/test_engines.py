"""The two shipped engines under one set of expectations, with real backends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tandem.config.schema import InferenceConfig, RolloutConfig, TinyModelConfig
from tandem.errors import CapabilityError
from tandem.models.loading import load_tokenizer
from tandem.models.tiny import save_tiny_model
from tandem.rollout import (
    EmbeddedInferenceEngine,
    InferenceEngine,
    ScriptedInferenceEngine,
    SingleTurnWorkflow,
)
from tandem.types import GenerationConfig, Prompt

ROLLOUT = RolloutConfig(
    batch_size=3,
    group_size=2,
    min_group_size=1,
    max_staleness=0,
    wait_timeout_s=60,
    generation=GenerationConfig(max_new_tokens=6),
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = TinyModelConfig(hidden_size=32, num_layers=2, intermediate_size=64, max_position=64)
    return str(save_tiny_model(sizes, tmp_path_factory.mktemp("model") / "tiny", seed=0))


@pytest.fixture(params=["scripted", "embedded"])
def engines(request: pytest.FixtureRequest, model_path: str) -> Iterator[Any]:
    made: list[InferenceEngine] = []

    def make(seed: int = 0) -> InferenceEngine:
        if request.param == "scripted":
            engine: InferenceEngine = ScriptedInferenceEngine(ROLLOUT, seed=seed)
        else:
            engine = EmbeddedInferenceEngine(
                InferenceConfig(mode="inprocess"),
                ROLLOUT,
                model_path=model_path,
                incarnation="test",
                seed=seed,
            )
        engine.initialize()
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.destroy()


class Source:
    def __len__(self) -> int:
        return 50

    def prompt(self, epoch: int, position: int) -> Prompt:
        return Prompt(epoch, position, {"prompt_ids": (5, 6 + position % 20, 7)})


def make_workflow(model_path: str) -> SingleTurnWorkflow:
    return SingleTurnWorkflow(
        lambda p, completion, p_ids, c_ids: float(len(c_ids)),
        generation=ROLLOUT.generation,
        tokenizer=load_tokenizer(model_path),
        group_size=2,
        seed=11,
    )


def test_a_synchronous_batch_repeats_bit_for_bit_in_a_fresh_engine(
    engines: Any, model_path: str
) -> None:
    first, second = (
        engines(seed).prepare_batch(Source(), make_workflow(model_path)) for seed in (0, 1)
    )
    assert first["episode_ids"].tolist() == [0, 0, 1, 1, 2, 2]
    for key in ("input_ids", "logprobs", "versions", "rewards", "loss_mask"):
        assert torch.equal(first[key], second[key]), key
    assert first["rewards"].tolist() == first["loss_mask"].sum(1).tolist()


def test_samples_are_the_same_for_any_split_of_the_prompts(engines: Any, model_path: str) -> None:
    workflow = make_workflow(model_path)
    prompts = [Source().prompt(0, i) for i in range(4)]

    def texts(batch: Any) -> list[list[int]]:
        rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
        return [ids[mask].tolist() for ids, mask in rows]

    engine = engines()
    whole = texts(engine.rollout_batch(prompts, workflow))
    parts = [engine.rollout_batch(part, workflow) for part in (prompts[:1], prompts[1:])]
    assert whole == [row for part in parts for row in texts(part)]


def test_an_engine_with_its_own_backend_takes_no_address(engines: Any) -> None:
    with pytest.raises(CapabilityError, match="addr"):
        engines().initialize("127.0.0.1:8000")


def test_describe_speaks_of_the_backend_too(engines: Any) -> None:
    assert "no episodes" in engines().describe()
    assert "rss_bytes" in engines().describe()
