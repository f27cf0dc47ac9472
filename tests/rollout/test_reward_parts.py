"""Rewards of several parts, and the greedy completion that ReMax compares with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tandem.config import RewardConfig
from tandem.errors import ConfigError, RolloutError
from tandem.rollout import load_reward
from tandem.rollout.scoring import Reward
from tandem.rollout.single_turn import SingleTurnWorkflow
from tandem.types import GenerationConfig, LLMRequest, Prompt
from tests.data.chat import with_template
from tests.rollout.doubles import GatedBackend, make_engine

TEXT = with_template("{{ messages }}")
EOS = 2


@pytest.fixture
def engines() -> Iterator[Any]:
    made = []

    def make(backend: GatedBackend | None = None) -> Any:
        made.append(make_engine(backend))
        return made[-1]

    yield make
    for engine in made:
        engine.destroy()


def saying(text: str) -> list[int]:
    return [*TEXT(text, add_special_tokens=False)["input_ids"], EOS]


def workflow(reward: Any, **changes: Any) -> SingleTurnWorkflow:
    settings = {
        "generation": GenerationConfig(max_new_tokens=20),
        "tokenizer": TEXT,
        "group_size": 2,
    }
    return SingleTurnWorkflow(reward=reward, **(settings | changes))


def row(**data: Any) -> Prompt:
    ids = tuple(TEXT("q", add_special_tokens=False)["input_ids"])
    return Prompt(0, 0, {"prompt": "q", "prompt_ids": ids, **data})


def parts(**weights: float) -> RewardConfig:
    return RewardConfig.model_validate(
        {
            "parts": {"right": {"name": "exact_match"}, "near": {"name": "contains_answer"}},
            "weights": weights,
        }
    )


@pytest.mark.parametrize("process", [False, True])
def test_reward_is_the_weighted_sum_and_rows_keep_the_parts(engines: Any, process: bool) -> None:
    config = parts(near=0.25).model_copy(update={"process": process})
    backend = GatedBackend(lambda req: saying("so 7" if req.rid.endswith("0") else "7"))
    batch = engines(backend).rollout_batch([row(answer="7")], workflow(load_reward(config)))
    assert batch["rewards"].tolist() == [0.25, 1.25]
    assert batch["reward_parts"].tolist() == [[0, 1], [1, 1]]


def test_a_function_may_return_parts_when_their_weights_are_named(engines: Any) -> None:
    async def scored(prompt: Any, completion: str, *_: Any) -> dict[str, float]:
        return {"length": float(len(completion)), "one": 1.0}

    reward = Reward(scored, weights={"one": 3.0, "length": -1.0})
    batch = engines(GatedBackend(lambda req: saying("ab"))).rollout_batch([row()], workflow(reward))
    assert batch["rewards"].tolist() == [1.0, 1.0]
    assert batch["reward_parts"].tolist() == [[1, 2], [1, 2]]


@pytest.mark.parametrize(
    ("returned", "weights", "message"),
    [
        ({"a": 1.0}, {}, "got none, but the reward returned a"),
        ({"a": 1.0}, {"a": 1.0, "b": 1.0}, "got a, b, but the reward returned a"),
        (1.0, {"a": 1.0}, "got a, but the reward returned one number"),
    ],
)
def test_parts_and_weights_have_to_have_the_same_labels(
    engines: Any, returned: Any, weights: dict[str, float], message: str
) -> None:
    reward = Reward(lambda *_: returned, weights=weights)
    with pytest.raises(ConfigError, match=message):
        engines().rollout_batch([row()], workflow(reward))


def test_a_part_that_cannot_be_scored_makes_the_reward_missing(engines: Any) -> None:
    def scored(prompt: Any, completion: str, *_: Any) -> dict[str, float | None]:
        return {"a": 1.0, "b": None if completion == "x" else 2.0}

    reward = Reward(scored, weights={"a": 1.0, "b": 1.0})
    backend = GatedBackend(lambda req: saying("x" if req.rid.endswith("0") else "y"))
    batch = engines(backend).rollout_batch([row()], workflow(reward))
    assert batch["rewards"].isnan().tolist() == [True, False]
    assert batch["reward_parts"].isnan().all(dim=1).tolist() == [True, False]


def greedy_is(greedy: str, drawn: str) -> GatedBackend:
    def script(request: LLMRequest) -> list[int]:
        return saying(greedy if request.gconfig.is_greedy else drawn)

    return GatedBackend(script)


def exact(prompt: Any, completion: str, *_: Any) -> float | None:
    if completion == "bad":
        raise ValueError("no")
    return None if completion == "none" else float(completion == "7")


def test_greedy_completion_is_scored_and_not_trained_on(engines: Any) -> None:
    backend = greedy_is("7", "8")
    engine = engines(backend)
    flow = workflow(exact).with_greedy_baseline()
    engine.submit(row(), flow)
    batch = engine.wait(1)
    assert batch["greedy_rewards"].tolist() == [1.0, 1.0]
    assert batch["rewards"].tolist() == [0.0, 0.0]
    assert [request.gconfig.is_greedy for request in backend.requests] == [False, False, True]


def test_greedy_completion_is_not_made_outside_training(engines: Any) -> None:
    backend = greedy_is("7", "8")
    batch = engines(backend).rollout_batch([row()], workflow(exact).with_greedy_baseline())
    assert "greedy_rewards" not in batch
    assert len(backend.requests) == 2


@pytest.mark.parametrize(("greedy", "count"), [("bad", "1 failed"), ("none", "1 rejected")])
def test_without_a_baseline_the_episode_is_lost(engines: Any, greedy: str, count: str) -> None:
    engine = engines(greedy_is(greedy, "8"))
    engine.submit(row(), workflow(exact).with_greedy_baseline())
    with pytest.raises(RolloutError) as caught:
        engine.wait(1)
    assert "can no longer be reached" in str(caught.value) or count in str(caught.value)


def test_the_wrong_use_of_parts_is_an_error_in_the_configuration() -> None:
    with pytest.raises(ValueError, match="no such part"):
        parts(wrong=1.0)
    with pytest.raises(ValueError, match=r"leave reward\.name"):
        RewardConfig.model_validate({"name": "gsm8k", "parts": {"a": {"name": "exact_match"}}})
