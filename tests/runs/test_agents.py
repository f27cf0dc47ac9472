"""A whole run on the real client: what is trained on is what was sampled, and nothing stays."""

from __future__ import annotations

import asyncio
import runpy
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tandem.config import load_config, resolve_recipe
from tandem.errors import RolloutError
from tandem.trainers import run_rl
from tandem.trainers.rl_learner import Learner
from tests.runs.conftest import metrics

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tool_agent.py"
TOOL: Any = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}

Token = tuple[int, float, int]
SAMPLED: list[list[Token]] = []
"""Of each agent that ran, every token with its log-probability and version."""


async def recording(base_url: str, api_key: str, data: Mapping[str, Any]) -> float:
    """Two turns, of which the second is streamed; every sampled token is written down."""
    import openai

    tokens: list[Token] = []
    messages: list[Any] = list(data["prompt"])
    asked: dict[str, Any] = {
        "model": "policy",
        "tools": [TOOL],
        "extra_body": {"return_token_ids": True},
    }
    http = openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http) as client:
        answer = await client.chat.completions.create(messages=messages, **asked)
        choice: Any = answer.choices[0]
        tokens += zip(choice.token_ids, choice.token_logprobs, choice.token_versions, strict=True)
        messages += [choice.message, {"role": "user", "content": "go on"}]
        stream = await client.chat.completions.create(messages=messages, stream=True, **asked)
        async for chunk in stream:
            last: Any = chunk.choices[0]
        tokens += zip(last.token_ids, last.token_logprobs, last.token_versions, strict=True)
    SAMPLED.append(tokens)
    return float(len(SAMPLED) % 2)


async def failing(**_: Any) -> float:
    await asyncio.sleep(0)
    raise ValueError("no luck")


def config(folder: Path, agent: str, *overrides: str) -> Any:
    """The recipe without its warm-up, a few steps of it, from an untrained model."""
    data = folder / "data"
    runpy.run_path(str(EXAMPLE))["prepare"](data)
    given = [
        f"run.output_dir={folder}",
        "run.threads=1",
        f"model.path={data}/model",
        "warmup=null",
        f"data.path={data}/prompts.jsonl",
        f"eval.data.path={data}/heldout.jsonl",
        "eval.data.size=4",
        "eval.samples=2",
        "eval.generation.max_new_tokens=6",
        "steps=3",
        "rollout.batch_size=2",
        "rollout.group_size=4",
        "rollout.generation.max_new_tokens=6",
        f"rollout.workflow_kwargs.agent={__name__}:{agent}",
        "rollout.workflow_kwargs.scored_by=agent",
        "inference.mode=inprocess",
        "tracking.progress=false",
        *overrides,
    ]
    return load_config(resolve_recipe("agent"), given)


def gateway_threads() -> list[str]:
    return [item.name for item in threading.enumerate() if item.name == "tandem-gateway"]


def test_tokens_versions_and_logprobs_trained_on_are_those_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[list[Token]] = []
    learn = Learner.learn

    def noting(self: Learner, batch: Any, **settings: Any) -> Any:
        for row in batch:
            on = row["loss_mask"]
            columns = (row[key][on].tolist() for key in ("input_ids", "logprobs", "versions"))
            trained.append(list(zip(*columns, strict=True)))
        return learn(self, batch, **settings)

    monkeypatch.setattr(Learner, "learn", noting)
    SAMPLED.clear()
    run_rl(config(tmp_path, "recording"))
    assert len(trained) == 3 * 2 * 4
    remaining = list(SAMPLED)
    for row in trained:
        remaining.remove(row)
    assert len({version for row in trained for _, _, version in row}) > 1
    rows = metrics(tmp_path / "agent")
    # Under other weights than the trainer's there is nothing to compare.
    assert max(row.get("mismatch/same_version_max", 0.0) for row in rows[1:]) < 1e-4
    # Evaluation ran the same program: half of its results are 1.
    assert rows[0]["eval/heldout/num_prompts"] == 4
    assert rows[0]["eval/heldout/reward_mean"] == 0.5
    assert gateway_threads() == []


def test_a_run_that_fails_leaves_no_gateway(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(RolloutError, match="no luck"):
        run_rl(config(tmp_path, "failing", "eval.data=null", "rollout.max_failures_in_row=2"))
    assert gateway_threads() == []
    assert {item.name for item in set(threading.enumerate()) - before} <= {"tandem-user-code"}


@pytest.mark.long
def test_an_agent_learns_keys_that_it_was_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLE.parents[1])
    data = tmp_path / "data"
    runpy.run_path(str(EXAMPLE))["prepare"](data)
    overrides = [
        f"run.output_dir={tmp_path}",
        f"model.path={data}/model",
        f"warmup.data.path={data}/demonstrations.jsonl",
        f"data.path={data}/prompts.jsonl",
        f"eval.data.path={data}/heldout.jsonl",
        "steps=40",
        "tracking.progress=false",
    ]
    run_rl(load_config(resolve_recipe("agent"), overrides))
    rows = metrics(tmp_path / "agent")
    before, after = (rows[i]["eval/heldout/reward_mean"] for i in (0, -1))
    assert after > before + 0.25
