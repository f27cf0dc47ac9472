"""What AReaL's workflow executor costs per trivial episode, in AReaL's Python.

Batches come from ``prepare_batch``, as large as what may be in flight, with one version of
staleness, as ours. They are lists of dictionaries, which AReaL's trainer makes one batch of; ours
are that already, so ``executor_and_concat_us`` has the cost of its function for that besides.
There is no durable store. Logs, dumps and format checks are off, as by default.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from episodes import GROUP, PROMPT, WIDTH, report, reward, steps_us

# isort: split
from areal.api import RolloutWorkflow
from areal.api.cli_args import InferenceEngineConfig
from areal.infra.workflow_executor import WorkflowExecutor
from areal.utils.data import concat_batch
from areal.version import __version__


class Trivial(RolloutWorkflow):
    """Yields to the loop once, scores two made-up completions, returns their rows."""

    def __init__(self) -> None:
        mask = torch.ones(GROUP, WIDTH, dtype=torch.bool)
        trained = mask.clone()
        trained[:, :PROMPT] = False
        self.rows = {
            "input_ids": torch.arange(GROUP * WIDTH).reshape(GROUP, WIDTH),
            "attention_mask": mask,
            "loss_mask": trained,
            "logprobs": torch.full((GROUP, WIDTH), -0.5),
        }

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0)
        scores = [await reward("4", "4") for _ in range(GROUP)]
        versions = torch.full((GROUP, WIDTH), engine.get_version())
        versions[:, :PROMPT] = -1
        return {**self.rows, "versions": versions, "rewards": torch.tensor(scores)}


class Versioned:
    """An inference engine that only knows its version."""

    version = 0

    def get_version(self) -> int:
        return self.version


class Prompts:
    """As many prompts as anyone asks for, in the shape of a data loader."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        while True:
            yield [{"question": "2 + 2 ="} for _ in range(self.batch_size)]


def executor_us(count: int, in_flight: int, *, concat: bool = False) -> float:
    engine: Any = Versioned()
    config = InferenceEngineConfig(
        backend="sglang:d1",  # required; nothing here looks at it
        max_concurrent_rollouts=in_flight,
        consumer_batch_size=in_flight,
        max_head_offpolicyness=1,
    )
    executor = WorkflowExecutor(config, engine)
    executor.initialize(logging.getLogger("executor"), train_data_parallel_size=1)
    workflow, prompts = Trivial(), Prompts(in_flight)

    def step() -> None:
        batch = executor.prepare_batch(prompts, workflow)
        if len(batch) != in_flight:
            raise SystemExit(f"a batch of {len(batch)} episodes, not {in_flight}")
        if concat:
            concat_batch(batch)
        engine.version += 1

    taken = steps_us(step, count, in_flight)
    executor.destroy()
    return taken


def main() -> None:
    workflow, engine = Trivial(), Versioned()
    ways = {"executor": executor_us, "executor_and_concat": partial(executor_us, concat=True)}
    report(__version__, lambda: workflow.arun_episode(engine, {}), ways)


if __name__ == "__main__":
    main()
