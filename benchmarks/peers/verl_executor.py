"""What verl's agent loop costs per trivial episode, in verl's Python.

One worker takes a batch and pads its rows into one, in this process: without Ray, without a server,
because the trivial loop generates nothing and knows its reward. An agent loop makes one row, so an
episode of two rows is two of them. verl hands over a batch when all of it is there: no staleness,
no store, nothing in flight between two batches.
"""

from __future__ import annotations

import asyncio
import tempfile
from importlib.metadata import version
from typing import Any

import numpy as np
from episodes import GROUP, PROMPT, WIDTH, report, reward, steps_us
from hydra import compose, initialize_config_module
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    AgentLoopWorker,
    register,
)
from verl.protocol import DataProto


async def make_row() -> AgentLoopOutput:
    """Yields to the loop once, scores a made-up completion, returns its row."""
    await asyncio.sleep(0)
    length = WIDTH - PROMPT
    return AgentLoopOutput(
        prompt_ids=list(range(PROMPT)),
        response_ids=list(range(length)),
        response_mask=[1] * length,
        response_logprobs=[-0.5] * length,
        reward_score=await reward("4", "4"),
        num_turns=2,
        metrics=AgentLoopMetrics(),
    )


@register("trivial")
class Trivial(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        return await make_row()


async def episode() -> list[AgentLoopOutput]:
    return [await make_row() for _ in range(GROUP)]


def open_worker(folder: str) -> AgentLoopWorker:
    """It reads a model's configuration and its tokenizer, which pads; no weights."""
    words = WordLevel({"<pad>": 0, "<|im_end|>": 1, "\n": 2}, unk_token="<pad>")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), pad_token="<pad>", eos_token="<|im_end|>"
    )
    tokenizer.save_pretrained(folder)
    Qwen3Config(architectures=["Qwen3ForCausalLM"]).save_pretrained(folder)
    rollout = "actor_rollout_ref.rollout"
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            [
                f"actor_rollout_ref.model.path={folder}",
                f"{rollout}.name=vllm",  # required; nothing here starts it
                f"{rollout}.prompt_length={PROMPT}",
                f"{rollout}.response_length={WIDTH - PROMPT}",
                f"{rollout}.agent.default_agent_loop=trivial",
            ],
        )
    return AgentLoopWorker(config, llm_client=None)


def executor_us(worker: AgentLoopWorker, count: int, in_flight: int) -> float:
    rows = GROUP * in_flight
    prompts = np.empty(rows, dtype=object)
    prompts[:] = [[{"role": "user", "content": "2 + 2 ="}]] * rows
    index = np.arange(in_flight).repeat(GROUP)

    def step() -> None:
        batch = DataProto.from_dict(non_tensors={"raw_prompt": prompts, "index": index})
        done = asyncio.run(worker.generate_sequences(batch))
        if len(done) != rows:
            raise SystemExit(f"a batch of {len(done)} rows, not {rows}")

    return steps_us(step, count, in_flight)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        worker = open_worker(folder)
        ways = {"executor": lambda count, in_flight: executor_us(worker, count, in_flight)}
        report(version("verl"), episode, ways)


if __name__ == "__main__":
    main()
