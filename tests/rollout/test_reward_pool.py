"""Rewards in child processes: deadlines, deaths, threads, and what travels."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.config.reward import RewardConfig
from tandem.errors import ConfigError, DataError, RolloutError
from tandem.rollout import reward_pool
from tandem.rollout.reward_pool import RewardPool
from tandem.rollout.scoring import RewardError, load_reward

REWARDS = '''
import os, subprocess, sys, time

def maybe(prompt, completion, prompt_ids, completion_ids, **data):
    """What the completion says."""
    if completion == "hang":
        while True:
            pass
    if completion == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open(data["file"], "w").write(str(child.pid))
        while True:
            pass
    if completion == "die":
        os._exit(3)
    if completion == "raise":
        raise ValueError("no")
    if completion == "print":
        print("between two messages", flush=True)
    if completion == "nan":
        return float("nan")
    if completion == "object":
        return object()
    if completion == "pid":
        return os.getpid()
    return 1.0

async def later(prompt, completion, prompt_ids, completion_ids):
    return len(completion_ids)
'''
WAIT_S = 60.0


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS)
    return file


@pytest.fixture
def pools() -> Iterator[Any]:
    made: list[RewardPool] = []

    def make(name: str, **settings: Any) -> RewardPool:
        made.append(RewardPool(name, **settings))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def send(pool: RewardPool, completion: str, **data: Any) -> Future[Any]:
    return pool.submit(["p", completion, [1], [2, 3]], data)


def outcome(future: Future[Any]) -> Any:
    error = future.exception(WAIT_S)
    return type(error).__name__ if error else future.result()


def test_a_hanging_call_is_killed_and_the_pool_keeps_its_size(pools: Any, rewards: Path) -> None:
    pool = pools(f"{rewards}:maybe", workers=2, timeout_s=1.0)
    first = [send(pool, text) for text in ("", "", "hang", "")]
    assert [outcome(future) for future in first] == [1, 1, "TimeoutError", 1]
    second = [send(pool, "") for _ in range(4)]
    assert [outcome(future) for future in second] == [1, 1, 1, 1]


def test_what_a_hanging_call_started_dies_with_it(
    pools: Any, rewards: Path, tmp_path: Path
) -> None:
    pool = pools(f"{rewards}:maybe", timeout_s=3.0)
    note = tmp_path / "pid"
    assert outcome(send(pool, "child", file=str(note))) == "TimeoutError"
    pid = int(note.read_text())
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(WAIT_S)


def test_other_ends_of_a_call_are_told_apart(pools: Any, rewards: Path) -> None:
    pool = pools(f"{rewards}:maybe")
    with pytest.raises(RolloutError, match="ValueError: no"):
        send(pool, "raise").result(WAIT_S)
    with pytest.raises(RolloutError, match="died with code 3"):
        send(pool, "die").result(WAIT_S)
    with pytest.raises(RolloutError, match="not JSON"):
        send(pool, "object").result(WAIT_S)
    assert outcome(send(pool, "print")) == 1
    with pytest.raises(DataError, match="not JSON"):
        send(pool, "", column=object())


def test_async_functions_run_in_a_child_too(pools: Any, rewards: Path) -> None:
    assert outcome(send(pools(f"{rewards}:later"), "")) == 2


def test_a_function_that_cannot_be_loaded_is_a_configuration_error(
    pools: Any, rewards: Path
) -> None:
    with pytest.raises(ConfigError, match="has no 'gone'"):
        send(pools(f"{rewards}:gone"), "").result(WAIT_S)


def test_a_pool_works_from_any_thread_and_any_event_loop(rewards: Path) -> None:
    reward = load_reward(
        RewardConfig(name="numeric_match", process=True, kwargs={"tolerance": 1e-3}, timeout_s=30)
    )
    assert reward.pool is not None
    results: list[Any] = []

    def work(completion: str) -> None:
        score = reward.score(
            prompt="",
            completion=completion,
            prompt_ids=(),
            completion_ids=(),
            data={"answer": "1/3"},
        )
        results.append(asyncio.run(score))

    completions = ["0.3333", "9" * 50_000, "1/3"]
    for completion in completions:
        thread = threading.Thread(target=work, args=(completion,))
        thread.start()
        thread.join(WAIT_S)
    assert results == [1, 0, 1]
    reward.pool.close()  # type: ignore[attr-defined]


def test_nan_from_a_child_is_a_failed_sample(rewards: Path) -> None:
    reward = load_reward(RewardConfig(name=f"{rewards}:maybe", process=True))
    score = reward.score(prompt="", completion="nan", prompt_ids=(), completion_ids=(), data={})
    with pytest.raises(RewardError, match="nan"):
        asyncio.run(score)
    reward.pool.close()  # type: ignore[union-attr]


def test_children_end_with_the_pool_closed_or_forgotten(pools: Any, rewards: Path) -> None:
    closed = pools(f"{rewards}:maybe")
    child = psutil.Process(outcome(send(closed, "pid")))
    closed.close()
    assert not child.is_running()
    forgotten = RewardPool(f"{rewards}:maybe")
    child = psutil.Process(outcome(send(forgotten, "pid")))
    (thread,) = forgotten._threads
    del forgotten
    gc.collect()
    thread.join(WAIT_S)
    assert not child.is_running()


def test_a_closed_pool_starts_again_at_the_next_call(pools: Any, rewards: Path) -> None:
    pool = pools(f"{rewards}:maybe")
    assert outcome(send(pool, "")) == 1
    pool.close()
    assert outcome(send(pool, "")) == 1


def test_the_worker_does_not_import_torch(pools: Any, tmp_path: Path) -> None:
    file = tmp_path / "modules.py"
    file.write_text("import sys\ndef f(*_, **__):\n    return float('torch' in sys.modules)\n")
    assert outcome(send(pools(f"{file}:f"), "")) == 0


def test_a_function_that_always_hangs_is_not_waited_for_once_a_completion(
    pools: Any, rewards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_pool, "MAX_HANGS_IN_ROW", 2)
    pool = pools(f"{rewards}:maybe", timeout_s=0.2)
    assert outcome(send(pool, "pid")) > 0
    hung = [pool.submit([f"p{i}", "hang", [1], [2]], {}) for i in range(40)]
    assert [outcome(future) for future in hung] == ["TimeoutError"] * 40
    assert sum("untried" in str(future.exception()) for future in hung) == 38
    assert outcome(send(pool, "")) == 1.0


def test_one_prompt_whose_completions_all_hang_takes_no_other_with_it(
    pools: Any, rewards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_pool, "MAX_HANGS_IN_ROW", 2)
    pool = pools(f"{rewards}:maybe", timeout_s=0.2)
    hung = [send(pool, "hang") for _ in range(3)]
    other = pool.submit(["another", "", [1], [2]], {})
    assert [outcome(future) for future in hung] == ["TimeoutError"] * 3
    assert not any("untried" in str(future.exception()) for future in hung)
    assert outcome(other) == 1.0
