"""Built-in rewards, loading by name, and what counts as a score."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tandem.config.reward import RewardConfig, RewardPartConfig
from tandem.errors import ConfigError
from tandem.rollout.rewards import BUILT_IN, last_number, reward_function
from tandem.rollout.scoring import Reward, RewardError, checked_score, load_reward
from tandem.rollout.workflow import RolloutWorkflow, load_workflow


def score(reward: Reward, completion: str = "", **data: Any) -> float | None:
    return asyncio.run(
        reward.score(
            prompt="p", completion=completion, prompt_ids=(1,), completion_ids=(2,), data=data
        )
    )


def named(name: str, **kwargs: Any) -> Reward:
    return load_reward(RewardConfig(name=name, kwargs=kwargs))


@pytest.mark.parametrize(
    ("name", "completion", "answer", "expected"),
    [
        ("exact_match", " 16\n", "16", 1),
        ("exact_match", "8 + 8 = 16", "16", 0),
        ("numeric_match", "8 + 8 = 16", "16", 1),
        ("numeric_match", "16 or 17", "16", 0),
        ("numeric_match", "it is 1,234.50.", "1234.5", 1),
        ("numeric_match", "1/3", "0.33333333", 1),
        ("numeric_match", "1/3", "0.33", 0),
        ("numeric_match", "10-3", "-3", 0),
        ("numeric_match", "x = -3", "-3", 1),
        ("numeric_match", "none", "-3", 0),
        ("numeric_match", "1/0", "1", 0),
        ("contains_answer", "It is Ann.", "Ann", 1),
        ("contains_answer", "it is ann", "Ann", 1),
        ("contains_answer", "Anna", "Ann", 0),
        ("contains_answer", "a+b", "a.b", 0),
        ("concise_answer", " Ann.\n", "Ann", 1),
        ("concise_answer", "Ann and Bob", "Ann", 0.5),
        ("concise_answer", "Anna", "Ann", 0),
        ("gsm8k", "so 3+4\n#### 7", "some steps\n#### 7", 1),
        ("gsm8k", "the answer is 7", "#### 7", 1),
        ("gsm8k", "7\n#### 8", "#### 7", 0),
        ("gsm8k", "#### 1,000", "#### 1000", 1),
    ],
)
def test_built_in_answers(name: str, completion: str, answer: str, expected: float) -> None:
    assert score(named(name), completion, answer=answer) == expected


def test_pathological_numbers_are_no_answers_and_cost_no_time() -> None:
    assert last_number("9" * 100_000) is None
    assert last_number("1e999999999") == 999999999
    assert last_number("") is None


def test_config_kwargs_reach_the_function_and_win_over_columns() -> None:
    assert score(named("numeric_match", tolerance=0.5), "15", answer="16", tolerance=0) == 1


def test_procedural_rows_bring_their_own_scorer() -> None:
    import reasoning_gym

    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=1)[0]
    data = {"task": "chain_sum", "entry": entry}
    assert score(named("auto"), f" {entry['answer']} ", **data) == 1
    assert score(named("reasoning_gym"), "no idea", **data) < 1


def test_auto_without_a_scorer_names_the_choices() -> None:
    with pytest.raises(ConfigError, match="exact_match"):
        score(named("auto"), "1", answer="1")


def test_a_function_gets_the_columns_that_it_names(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def plain(p, c, p_ids, c_ids, answer):\n    return len(c) + answer\n"
        "async def later(p, c, p_ids, c_ids, **data):\n    return sum(c_ids) + len(data)\n"
        "not_callable = 3\n"
    )
    assert score(named(f"{file}:plain"), "ab", answer=5, other=1) == 7
    assert score(named(f"{file}:later"), "ab", answer=5, prompt="again") == 3
    with pytest.raises(ConfigError, match="not a function"):
        reward_function(f"{file}:not_callable", {})
    with pytest.raises(ConfigError, match="has no 'gone'"):
        reward_function(f"{file}:gone", {})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exactmatch", "allowed: auto, code, concise_answer"),
        ("no/such/file.py:f", "no file"),
        ("no_such_module:f", "importing 'no_such_module' failed"),
        (":f", "path/to/file.py:name"),
    ],
)
def test_a_wrong_name_says_what_is_allowed(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        reward_function(name, {})


def test_module_paths_load() -> None:
    assert reward_function("tandem.rollout.rewards:gsm8k", {}) is BUILT_IN["gsm8k"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, None), (True, 1.0), (2, 2.0), (torch.tensor(0.5), 0.5), (torch.tensor(1), 1.0)],
)
def test_scores(value: Any, expected: float | None) -> None:
    assert checked_score(value) == expected


@pytest.mark.parametrize("value", ["1", [1.0], float("nan"), -float("inf"), 1j, torch.ones(2)])
def test_what_is_no_score(value: Any) -> None:
    with pytest.raises(RewardError, match="allowed: a finite number or None"):
        checked_score(value)


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), ValueError("no")])
@pytest.mark.parametrize("is_async", [False, True])
def test_whatever_a_function_raises_fails_its_sample_only(
    error: BaseException, is_async: bool
) -> None:
    def raises(*_: Any, **__: Any) -> float:
        raise error

    async def raises_later(*_: Any, **__: Any) -> float:
        raise error

    with pytest.raises(RewardError, match=f"the reward raised {type(error).__name__}"):
        score(Reward(raises_later if is_async else raises))


def test_a_hanging_function_fails_at_its_deadline() -> None:
    release = threading.Event()
    reward = Reward(lambda *_, **__: release.wait(), timeout_s=0.05)
    with pytest.raises(RewardError, match=r"0\.05 s"):
        score(reward)
    release.set()


def test_threads_are_used_again_but_never_one_that_hangs() -> None:
    release = threading.Event()
    seen: list[threading.Thread] = []

    def reward(*_: Any, **__: Any) -> float:
        seen.append(threading.current_thread())
        if len(seen) == 1:
            release.wait()
        return 1.0

    with pytest.raises(RewardError, match=r"0\.05 s"):
        score(Reward(reward, timeout_s=0.05))
    assert [score(Reward(reward)) for _ in range(50)] == [1.0] * 50
    release.set()
    assert seen[0] not in seen[1:]
    assert len(set(seen)) < 50


def test_a_hanging_async_function_is_cancelled_at_its_deadline() -> None:
    async def forever(*_: Any, **__: Any) -> float:
        await asyncio.Event().wait()
        return 1.0

    with pytest.raises(RewardError, match=r"0\.05 s"):
        score(Reward(forever, timeout_s=0.05))


def test_a_users_function_does_not_block_the_event_loop() -> None:
    """The second call can only return when the first is still running beside it."""
    both = threading.Barrier(2, timeout=20)
    reward = Reward(lambda *_, **__: both.wait() * 0)

    async def two() -> list[float | None]:
        arguments = {"prompt": "", "completion": "", "prompt_ids": (), "completion_ids": ()}
        calls = [reward.score(**arguments, data={}) for _ in range(2)]  # type: ignore[arg-type]
        return await asyncio.gather(*calls)

    assert asyncio.run(two()) == [0, 0]


def test_workflows_load_by_name_and_get_what_they_ask_for(tmp_path: Path) -> None:
    file = tmp_path / "flow.py"
    file.write_text(
        "from tandem.rollout.workflow import RolloutWorkflow\n"
        "class Mine(RolloutWorkflow):\n"
        "    def __init__(self, seed, turns=1):\n        self.seed, self.turns = seed, turns\n"
        "    async def arun_episode(self, engine, data):\n        return None\n"
        "def other(seed):\n    return seed\n"
    )
    made: Any = load_workflow(f"{file}:Mine", seed=3, tokenizer=None, turns=2)
    assert isinstance(made, RolloutWorkflow)
    assert (made.seed, made.turns) == (3, 2)
    with pytest.raises(ConfigError, match=r"workflow_kwargs\.trns.*turns"):
        load_workflow(f"{file}:Mine", seed=3, trns=2)
    with pytest.raises(ConfigError, match="made a int"):
        load_workflow(f"{file}:other", seed=3)


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1),
        (r"It is $x^2+2x+1$.", "(x+1)^2", 1),
        (r"It is $x^2+2x-1$.", "(x+1)^2", 0),
        (r"\boxed{-\frac12}", r"$\frac{1}{2}$", 0),
        ("the answer is 1,200", "1200", 1),
        ("7", "8", 0),
        ("no idea", "8", 0),
        (r"\boxed{", "8", 0),
    ],
)
def test_mathematics_is_compared_as_algebra(completion, answer, expected):
    assert BUILT_IN["math"]("p", completion, (), (), answer=answer) == expected


def test_an_answer_that_is_no_mathematics_is_the_datas_fault():
    with pytest.raises(ConfigError, match="reward math"):
        BUILT_IN["math"]("p", "$1$", (), (), answer="$$")


def test_algebra_runs_in_a_process_that_can_be_killed():
    with pytest.raises(ValidationError, match=r"reward\.process=true"):
        RewardConfig(name="math")
    with pytest.raises(ValidationError, match=r"reward\.process=true"):
        RewardConfig(parts={"right": RewardPartConfig(name="math")})
    reward = load_reward(RewardConfig(name="math", process=True))
    try:
        assert score(reward, r"\boxed{\frac{3}{6}}", answer="1/2") == 1.0
    finally:
        reward.pool.close()


def test_a_format_is_that_of_the_whole_completion():
    thought = "<think>a\nb</think>\n<answer>3</answer>"
    assert score(named("format"), thought) == 1.0
    assert score(named("format"), thought + "!") == 0.0
    assert score(named("format", pattern=r"[a-z]+"), "abc") == 1.0
    assert score(named("format", pattern=r"[a-z]+"), "abC") == 0.0
    with pytest.raises(ConfigError, match=r"reward\.kwargs\.pattern"):
        score(named("format", pattern="("), "abc")
