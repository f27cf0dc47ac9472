"""Agents as workflows: their rows, rewards, ends, and programs of their own."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import torch

from tandem.errors import ConfigError, RolloutError
from tandem.rollout.workflow import load_workflow
from tandem.serve import AgentWorkflow
from tandem.types import GenerationConfig, Prompt
from tests.rollout.doubles import GatedBackend, count, make_engine
from tests.serve.test_gateway import CALL, TOKENIZER, TOOL, ids, user

PROMPT = Prompt(0, 3, {"prompt": "q", "prompt_ids": (5,), "answer": "2"})


async def tool_agent(base_url: str, api_key: str, data: Mapping[str, Any]) -> float:
    """Two turns: a call, whose answer is the row's, and the model's last word."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages: list[Any] = [user(data["prompt"])]
        ask = client.chat.completions.create
        first = await ask(model="policy", messages=messages, tools=[TOOL])  # type: ignore[list-item]
        message = first.choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": data["answer"]})
        last = await ask(model="policy", messages=messages, tools=[TOOL])  # type: ignore[list-item]
    return float(last.choices[0].message.content == data["answer"])


def plain_agent(base_url: str, api_key: str, data: Mapping[str, Any]) -> None:
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        client.chat.completions.create(model="policy", messages=[user("q")])  # type: ignore[list-item]


@pytest.fixture
def run() -> Iterator[Any]:
    opened: list[Any] = []

    def start(script: Any, agent: Any = tool_agent, **settings: Any) -> tuple[Any, AgentWorkflow]:
        engine = make_engine(GatedBackend(script))
        workflow = AgentWorkflow(
            reward=settings.pop("reward", lambda *_, **__: 10.0),
            generation=GenerationConfig(max_new_tokens=200),
            tokenizer=TOKENIZER,
            agent=agent,
            seed=7,
            **settings,
        )
        opened.append((engine, workflow))
        return engine, workflow

    yield start
    for engine, workflow in opened:
        workflow.close()
        engine.destroy()


def turns(*texts: str) -> Any:
    return lambda req: ids(texts[int(req.rid.split(".")[-2])])


TWO = turns(f"{CALL}<eos>", "2<eos>")


def text(row: Any, *, trained: bool) -> str:
    on = row["loss_mask"] if trained else row["attention_mask"]
    found: str = TOKENIZER.decode(row["input_ids"][on])
    return found


def test_a_two_turn_tool_agent_is_trained_on_its_very_tokens(run: Any) -> None:
    engine, workflow = run(TWO, group_size=2, min_group_size=2)
    engine.submit(PROMPT, workflow)
    batch = engine.wait(1)
    assert len(batch) == 2
    for row in batch:
        assert text(row, trained=False) == f"T1 [u]q[a]{CALL}<eos>[t]2[a]2<eos>"
        assert text(row, trained=True) == f"{CALL}<eos>2<eos>"
        assert float(row["rewards"]) == float(row["token_rewards"].sum()) == 1.0
        assert bool(row["token_rewards"][-1] == 1.0)
    assert batch["sample_ids"].tolist() == [0, 1]
    assert batch["group_ids"].tolist() == [3, 3]
    seeds = [req.gconfig.seed for req in engine.backend.requests]
    assert len(set(seeds)) == 4


def test_the_same_run_draws_the_same_seeds_on_every_attempt(run: Any) -> None:
    engine, workflow = run(TWO)
    for attempt in (0, 1):
        engine.executor.submit(PROMPT, workflow, attempt=attempt)
        engine.wait(1)
        engine.backend.commit(engine.get_version() + 1)
        engine.set_version(engine.get_version())
    seeds = [req.gconfig.seed for req in engine.backend.requests]
    assert seeds[:2] == seeds[2:]


def test_the_executor_knows_whose_requests_come_through_the_gateway(run: Any) -> None:
    """With staleness 0 the whole batch is enqueued before the first forward pass."""
    from tests.rollout.doubles import Prompts

    engine, workflow = run(TWO)
    engine.destroy()
    engine = make_engine(GatedBackend(TWO), max_staleness=0, batch_size=3, group_size=1)
    try:
        engine.prepare_batch(Prompts(10, prompt="q", answer="2"), workflow)
        assert len(engine.backend.seen) == 3
    finally:
        engine.destroy()


def test_a_plain_function_runs_in_a_thread_and_the_reward_scores_its_last_answer(run: Any) -> None:
    calls = []

    def reward(prompt: Any, completion: str, p: Any, c: Any, **data: Any) -> float:
        calls.append((prompt, completion, data["answer"], data["turns"]))
        return 10.0

    engine, workflow = run(turns("hi<eos>"), plain_agent, scored_by="reward", reward=reward)
    batch = engine.rollout_batch([PROMPT], workflow)
    assert calls == [("q", "hi", "2", ["hi"])]
    assert batch["rewards"].tolist() == [10.0]
    engine, workflow = run(TWO, scored_by="both")
    assert engine.rollout_batch([PROMPT], workflow)["rewards"].tolist() == [11.0]


def test_an_agent_that_cannot_be_scored_keeps_its_rows_without_loss(run: Any) -> None:
    results = iter([1.0, None])

    def agent(**asked: Any) -> float | None:
        plain_agent(**asked)
        return next(results)

    engine, workflow = run(turns("hi<eos>"), agent, group_size=2)
    batch = engine.rollout_batch([PROMPT], workflow)
    assert sorted(batch["rewards"].isnan().tolist()) == [False, True]
    assert torch.equal(batch["loss_mask"].any(1), ~batch["rewards"].isnan())


def test_rows_of_a_rewritten_history_are_one_trajectory(run: Any) -> None:
    async def forgetful(base_url: str, api_key: str, data: Any) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            for prompt in ("q", "r"):
                await client.chat.completions.create(model="m", messages=[user(prompt)])  # type: ignore[list-item]
        return 1.0

    engine, workflow = run(turns("a<eos>", "b<eos>"), forgetful, group_size=2)
    batch = engine.rollout_batch([PROMPT], workflow)
    assert batch["sample_ids"].tolist() == [0, 0, 1, 1]
    assert [text(row, trained=True) for row in batch[:2]] == ["a<eos>", "b<eos>"]
    assert batch["rewards"].tolist() == [1.0] * 4
    assert torch.equal(batch["turn_ids"].amax(1), torch.tensor([0, 1, 0, 1]))


async def _raise(**_: Any) -> float:
    raise ValueError("no luck")


async def _idle(**_: Any) -> float:
    return 1.0


async def _hang(**_: Any) -> float:
    await asyncio.Event().wait()
    return 1.0


def _wrong(result: Any) -> Any:
    async def agent(base_url: str, api_key: str, data: Any) -> Any:
        await asyncio.to_thread(plain_agent, base_url, api_key, data)
        return result

    return agent


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (_raise, "ValueError: no luck"),
        (_idle, "no completion"),
        (_hang, "agent_timeout_s"),
        (_wrong(float("nan")), "returned nan"),
        (_wrong("1"), "returned a str"),
    ],
)
def test_an_agent_that_fails_loses_the_sample(run: Any, agent: Any, message: str) -> None:
    timeout_s = 0.1 if agent is _hang else 30.0
    engine, workflow = run(turns("hi<eos>"), agent, agent_timeout_s=timeout_s)
    engine.submit(PROMPT, workflow)
    with pytest.raises(RolloutError, match=message):
        engine.wait(1)
    assert count(engine, "failed") == 1


def test_an_answer_after_the_end_of_the_episode_is_not_trained(run: Any) -> None:
    """The agent leaves while a request is under way: what it was answered counts, no more."""
    late: list[threading.Thread] = []
    refused: list[int] = []

    def ask_late(client: openai.OpenAI) -> None:
        try:
            client.chat.completions.create(model="m", messages=[user("late")])  # type: ignore[list-item]
        except openai.APIStatusError as error:
            refused.append(error.status_code)
        client.close()

    def leaves(base_url: str, api_key: str, data: Any) -> float:
        client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        client.chat.completions.create(model="m", messages=[user("q")])  # type: ignore[list-item]
        late.append(threading.Thread(target=ask_late, args=(client,)))
        late[0].start()
        engine.backend.wait_held(1)
        return 1.0

    engine, workflow = run(turns("a<eos>", "b<eos>"), leaves)
    engine.backend.allow(lambda req, made: req.rid.split(".")[-2] == "0")
    batch = engine.rollout_batch([PROMPT], workflow)
    assert [text(row, trained=True) for row in batch] == ["a<eos>"]
    late[0].join(20)
    assert refused == [410]


PROGRAM = """
import json, os, sys
from urllib.request import Request, urlopen
row = json.load(sys.stdin)
if row["prompt"] == "fail":
    print("broken", file=sys.stderr)
    raise SystemExit(3)
body = {"model": "m", "messages": [{"role": "user", "content": row["prompt"]}]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
urlopen(Request(url, json.dumps(body).encode(), key)).read()
print("reward: 1000")
"""


def test_a_program_finds_its_gateway_in_the_environment(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    settings = {"command": [sys.executable, str(file)], "scored_by": "reward"}
    engine, workflow = run(turns("hi<eos>"), None, **settings)
    batch = engine.rollout_batch([PROMPT], workflow)
    assert [text(row, trained=False) for row in batch] == ["[u]q[a]hi<eos>"]
    assert batch["rewards"].tolist() == [10.0]
    with pytest.raises(RolloutError, match="code 3: broken"):
        engine.rollout_batch([Prompt(0, 0, {**PROMPT.data, "prompt": "fail"})], workflow)


LEAVES_A_CHILD = """
import subprocess, sys
child = subprocess.Popen(["sleep", "600"], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
print(child.pid, file=open(sys.argv[1], "w"))
"""


def test_what_a_program_leaves_running_ends_with_its_sample(run: Any, tmp_path: Path) -> None:
    file, pid_file = tmp_path / "program.py", tmp_path / "pid"
    file.write_text(LEAVES_A_CHILD)
    settings = {"command": [sys.executable, str(file), str(pid_file)], "scored_by": "reward"}
    engine, workflow = run(turns("hi<eos>"), None, **settings)
    with pytest.raises(RolloutError, match="no completion"):
        engine.rollout_batch([PROMPT], workflow)
    deadline = time.monotonic() + 60.0  # a killed process ends when it is scheduled next
    while not has_ended(int(pid_file.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has_ended(pid: int) -> bool:
    """Gone, or a zombie that its new parent has yet to collect."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_settings_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "reward": lambda *_: 1.0,
        "generation": GenerationConfig(),
        "tokenizer": TOKENIZER,
    }
    for changes, message in (
        ({}, "exactly one"),
        ({"agent": tool_agent, "command": ["x"]}, "exactly one"),
        ({"agent": tool_agent, "scored_by": "me"}, "scored_by"),
        ({"command": ["x"]}, "no reward"),
        ({"agent": "nowhere.py:agent"}, "no file"),
    ):
        with pytest.raises(ConfigError, match=message):
            AgentWorkflow(**settings | changes)
    file = tmp_path / "mine.py"
    file.write_text("async def agent(base_url, api_key, data):\n    return 1.0\n")
    made = load_workflow("agent", **settings, agent=f"{file}:agent")
    assert isinstance(made, AgentWorkflow)
