"""Rewards that see groups or batches, caps on calls at once, and limits of child processes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tandem.config import load_config
from tandem.config.reward import RewardConfig
from tandem.errors import ConfigError, RolloutError
from tandem.rollout.limits import Limits
from tandem.rollout.reward_pool import RewardPool
from tandem.rollout.scoring import Completion, Reward, RewardError, load_reward
from tandem.types import Prompt
from tests.rollout.doubles import GatedBackend, count, make_engine
from tests.rollout.test_code_reward import contained
from tests.rollout.test_single_turn import PROMPT, by_sample, workflow


def asked(text: str, **columns: Any) -> Completion:
    return Completion("p", text, (1,), (2,), columns)


# --- groups ---------------------------------------------------------------------------------------


def test_a_group_reward_sees_all_completions_of_a_prompt_at_once() -> None:
    calls = []

    def rank(prompt: Any, completions: Any, prompt_ids: Any, completion_ids: Any, **data: Any):
        calls.append((prompt, completions, prompt_ids, completion_ids, data))
        return [completions.index(c) for c in completions]

    engine = make_engine(GatedBackend(by_sample([10, 2], [11, 2], [12, 2])))
    try:
        chosen = workflow(Reward(rank, per="group"), group_size=3)
        batch = engine.rollout_batch([PROMPT], chosen)
    finally:
        engine.destroy()
    assert calls == [
        ("ab", ["a", "b", "c"], [1, 10, 11], [[10, 2], [11, 2], [12, 2]], {"answer": "c"})
    ]
    assert batch["rewards"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ([1.0, None], [1.0, None]),
        ([1.0, float("nan")], [1.0, RewardError]),
        ((True, "x"), [1.0, RewardError]),
        ([1.0], [RewardError, RewardError]),
        (1.0, [RewardError, RewardError]),
        (None, [RewardError, RewardError]),
    ],
)
def test_each_score_of_a_group_is_judged_by_itself(result: Any, expected: list[Any]) -> None:
    reward = Reward(lambda *_, **__: result, per="group")
    scores = asyncio.run(reward.score_group([asked("a"), asked("b")], {}))
    kinds = [RewardError if isinstance(item, RewardError) else item for item in scores]
    assert kinds == expected


def test_a_group_reward_that_raises_fails_the_group() -> None:
    engine = make_engine(GatedBackend())
    try:
        engine.submit(PROMPT, workflow(Reward(lambda *_, **__: 1 / 0, per="group")))
        with pytest.raises(RolloutError, match="ZeroDivisionError"):
            engine.wait(1)
        assert count(engine, "failed") == 1
    finally:
        engine.destroy()


# --- batches --------------------------------------------------------------------------------------


def test_a_batch_reward_gets_lists_of_everything() -> None:
    calls = []

    async def score(prompts: Any, completions: Any, prompt_ids: Any, completion_ids: Any, **data):
        calls.append((prompts, completions, prompt_ids, completion_ids, data))
        return [len(text) for text in completions]

    reward = Reward(score, per="batch", batch_size=2, batch_wait_s=10.0)

    async def both() -> list[float | None]:
        one = {"prompt": "p", "prompt_ids": (1,), "completion_ids": (2,)}
        return await asyncio.gather(
            reward.score(**one, completion="a", data={"answer": "x", "level": 1}),
            reward.score(**one, completion="bb", data={"answer": "y"}),
        )

    assert asyncio.run(both()) == [1, 2]
    data = {"answer": ["x", "y"], "level": [1, None]}
    assert calls == [(["p", "p"], ["a", "bb"], [[1], [1]], [[2], [2]], data)]


def test_a_batch_that_does_not_fill_is_sent_after_its_wait() -> None:
    engine = make_engine(GatedBackend(by_sample([10, 2], [11, 2])), max_concurrent=4)
    sizes = []

    def score(prompts: Any, completions: Any, *_: Any, **__: Any) -> list[float]:
        sizes.append(len(completions))
        return [1.0] * len(completions)

    try:
        reward = Reward(score, per="batch", batch_size=100, batch_wait_s=0.02)
        prompts = [Prompt(0, i, PROMPT.data) for i in range(3)]
        batch = engine.rollout_batch(prompts, workflow(reward))
    finally:
        engine.destroy()
    assert batch["rewards"].tolist() == [1.0] * 6
    assert sum(sizes) == 6


def test_a_batch_that_fails_fails_each_of_it() -> None:
    reward = Reward(lambda *_, **__: [1.0], per="batch", batch_size=2)

    async def both() -> list[Any]:
        one = {"prompt": "p", "completion": "", "prompt_ids": (1,), "completion_ids": (2,)}
        calls = [reward.score(**one, data={}) for _ in range(2)]
        return await asyncio.gather(*calls, return_exceptions=True)

    assert [type(item) for item in asyncio.run(both())] == [RewardError, RewardError]


# --- caps and limits ------------------------------------------------------------------------------


def test_no_more_calls_run_at_once_than_allowed() -> None:
    running, most = 0, 0

    async def score(*_: Any, **__: Any) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1
        return 1.0

    reward = Reward(score, max_concurrent=3)

    async def many() -> list[float | None]:
        one = {"prompt": "p", "completion": "", "prompt_ids": (1,), "completion_ids": (2,)}
        return await asyncio.gather(*(reward.score(**one, data={}) for _ in range(20)))

    assert asyncio.run(many()) == [1.0] * 20
    assert most == 3
    # Another event loop has places of its own.
    assert asyncio.run(many()) == [1.0] * 20


LIMITED = """
import socket

def score(prompt, completion, prompt_ids, completion_ids):
    if completion == "memory":
        return len(bytearray(1 << 30))
    if completion == "cpu":
        while True:
            pass
    if completion == "network":
        socket.create_connection(("127.0.0.1", 9), 2)
    return 1.0
"""


@pytest.fixture
def limited(tmp_path: Path) -> str:
    file = tmp_path / "limited.py"
    file.write_text(LIMITED)
    return f"{file}:score"


def outcome(pool: RewardPool, completion: str) -> Any:
    try:
        return pool.submit(["p", completion, [], []], {}).result(60)
    except (RolloutError, ConfigError, TimeoutError) as error:
        return str(error)


@contained
def test_limits_end_the_call_that_breaks_them_and_not_the_pool(limited: str) -> None:
    limits = Limits(memory_mb=512, cpu_s=1, network=False)
    pool = RewardPool(limited, timeout_s=30.0, limits=limits)
    try:
        assert "MemoryError" in outcome(pool, "memory")
        assert outcome(pool, "fine") == 1.0
        assert "processor time" in outcome(pool, "cpu")
        assert "Network is unreachable" in outcome(pool, "network")
        assert outcome(pool, "fine") == 1.0
    finally:
        pool.close()


def test_the_network_is_there_unless_it_is_taken(limited: str) -> None:
    pool = RewardPool(limited)
    try:
        assert "refused" in outcome(pool, "network")
    finally:
        pool.close()


def test_limits_without_a_process_are_refused() -> None:
    for changes in ({"memory_mb": 100}, {"cpu_s": 1.0}, {"network": False}):
        with pytest.raises(ValueError, match=r"reward\.process"):
            RewardConfig(**changes)


def test_a_configuration_chooses_how_a_reward_is_called(limited: str) -> None:
    config = load_config(
        {
            "kind": "rl",
            "model": {"path": "x"},
            "data": {"source": "jsonl", "path": "x"},
            "rollout": {"reward": {"name": limited, "per": "group", "max_concurrent": 2}},
        }
    )
    reward = load_reward(config.rollout.reward)
    assert (reward.sees_group, reward.max_concurrent) == (True, 2)
