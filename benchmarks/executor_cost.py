"""What the executor costs per trivial episode: grouping, reward and the durable store included.

The same coroutines run bare under asyncio first; what an episode takes beyond that is the
executor's. Batches are handed over and consumed as a trainer would. Processor time of the process,
one thread; the minimum of several rounds.

    python benchmarks/executor_cost.py --in-flight 10 100 1000 10000
    python benchmarks/executor_cost.py --in-flight 10 --batch 10 128
    python benchmarks/executor_cost.py --memory
    python benchmarks/executor_cost.py --peer areal=AREAL/bin/python verl=VERL/bin/python

A peer has no store, so its figures stand beside ``executor_us``; see ``peers/NAME_executor.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from peer import Peer
from tensordict import TensorDict

from tandem.config.schema import RolloutConfig
from tandem.inference.memory import rss_bytes
from tandem.rollout import RolloutWorkflow, ScriptedInferenceEngine
from tandem.rollout.rewards import reward_function
from tandem.rollout.scoring import Reward
from tandem.store import STORE_FILE, SqliteStore, StoreWriter
from tandem.types import GenerationConfig, Prompt, WeightVersion

GROUP = 2
WIDTH = 16


class Trivial(RolloutWorkflow):
    """Yields to the loop once, scores two made-up completions, returns their rows."""

    def __init__(self) -> None:
        self.reward = Reward(reward_function("exact_match", {}))
        mask = torch.ones(GROUP, WIDTH, dtype=torch.bool)
        trained = mask.clone()
        trained[:, :4] = False
        self.rows = {
            "input_ids": torch.arange(GROUP * WIDTH).reshape(GROUP, WIDTH),
            "attention_mask": mask,
            "loss_mask": trained,
            "logprobs": torch.full((GROUP, WIDTH), -0.5),
            "temperature": torch.ones(GROUP),
            "truncated": torch.zeros(GROUP, dtype=torch.bool),
        }

    async def arun_episode(self, engine: Any, data: Mapping[str, Any]) -> TensorDict:
        await asyncio.sleep(0)
        scores = [
            await self.reward.score(
                prompt="2 + 2 =",
                completion="4",
                prompt_ids=(1, 2, 3, 4),
                completion_ids=(5, 6),
                data={"answer": "4"},
            )
            for _ in range(GROUP)
        ]
        versions = torch.full((GROUP, WIDTH), engine.get_version())
        versions[:, :4] = -1
        rewards = torch.tensor(scores)
        return TensorDict(
            {**self.rows, "versions": versions, "rewards": rewards}, batch_size=[GROUP]
        )


class Held(Trivial):
    """Goes on when ``gate`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def arun_episode(self, engine: Any, data: Mapping[str, Any]) -> TensorDict:
        await self.gate.wait()
        return await super().arun_episode(engine, data)


class Prompts:
    """As many prompts as anyone asks for."""

    def __len__(self) -> int:
        return 1 << 30

    def prompt(self, epoch: int, position: int) -> Prompt:
        return Prompt(epoch, position, {"question": "2 + 2 ="})


class Fixed:
    """An engine that only knows its version."""

    def get_version(self) -> int:
        return 0


def bare_us(count: int, in_flight: int) -> float:
    """The coroutines alone, ``in_flight`` at a time, in one event loop."""
    workflow = Trivial()
    engine: Any = Fixed()
    batches = max(1, count // in_flight)

    async def run() -> float:
        began = time.process_time()
        for _ in range(batches):
            await asyncio.gather(*[workflow.arun_episode(engine, {}) for _ in range(in_flight)])
        return time.process_time() - began

    return asyncio.run(run()) / (batches * in_flight) * 1e6


def executor_us(
    count: int, in_flight: int, folder: Path | None, *, batch: int | None = None
) -> float:
    """Through the executor, ``in_flight`` at a time; with a store in ``folder`` or without.

    Handed over in batches of ``batch`` episodes, by default as many as are in flight.
    """
    batch = batch or in_flight
    config = RolloutConfig(
        batch_size=batch,
        group_size=GROUP,
        max_concurrent=in_flight,
        max_staleness=1,
        generation=GenerationConfig(max_new_tokens=WIDTH),
    )
    store = writer = None
    if folder is not None:
        folder.mkdir()
        store = SqliteStore(folder / STORE_FILE)
        writer = StoreWriter(store, "benchmark")
    engine = ScriptedInferenceEngine(config, writer=writer)
    engine.initialize()
    backend: Any = engine.backend
    workflow, source = Trivial(), Prompts()

    def step() -> None:
        engine.prepare_batch(source, workflow)
        backend._version = WeightVersion("benchmark", engine.get_version() + 1)
        engine.set_version(engine.get_version())

    step()
    began = time.process_time()
    steps = max(1, count // batch)
    for _ in range(steps):
        step()
    if writer is not None:
        writer.flush()
    taken = time.process_time() - began
    engine.destroy()
    if writer is not None and store is not None:
        writer.close()
        store.close()
    return taken / (steps * batch) * 1e6


def memory_kib(count: int) -> float:
    """Resident memory of an episode that runs, beyond a tenth as many; once a process."""
    config = RolloutConfig(batch_size=count, group_size=GROUP, max_concurrent=count)
    engine = ScriptedInferenceEngine(config)
    engine.initialize()
    workflow, source, used = Held(), Prompts(), []
    for first, last in ((0, count // 10), (count // 10, count)):
        for position in range(first, last):
            engine.submit(source.prompt(0, position), workflow)
        while engine.executor.snapshot().num_running < last:
            engine.executor.loop.flush(60.0)
        used.append(rss_bytes())
    engine.destroy()
    return (used[1] - used[0]) / (count - count // 10) / 1024


def measure(arguments: argparse.Namespace, in_flight: int, batch: int, folder: Path) -> None:
    """Print the least of several rounds; bare and executor alternate."""
    count, rounds = arguments.episodes, []
    folder.mkdir()
    for number in range(arguments.rounds):
        bare = bare_us(count, in_flight)
        memory = executor_us(count, in_flight, None, batch=batch)
        stored = executor_us(count, in_flight, folder / str(number), batch=batch)
        rounds.append((bare, memory, stored))
    bare, memory, stored = (min(column) for column in zip(*rounds, strict=True))
    result = {
        "engine": "tandem",
        "in_flight": in_flight,
        "batch": batch,
        "bare_us": round(bare, 1),
        "executor_us": round(memory - bare, 1),
        "executor_and_store_us": round(stored - bare, 1),
    }
    print(json.dumps(result), flush=True)


def measure_peer(peer: Peer, arguments: argparse.Namespace, in_flight: int) -> None:
    found = peer.run(
        [
            f"--in-flight={in_flight}",
            f"--episodes={arguments.episodes}",
            f"--rounds={arguments.rounds}",
        ],
        threads=1,
    )
    print(json.dumps({"engine": peer.name, **found}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--in-flight", type=int, nargs="+", default=[10, 100, 1000, 10000])
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[0], help="episodes of a batch; 0: as in flight"
    )
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--peer",
        nargs="*",
        default=[],
        metavar="NAME=PYTHON",
        help="run beside ours wherever a batch is as large as what is in flight",
    )
    parser.add_argument("--memory", action="store_true", help="KiB of an episode, nothing else")
    arguments = parser.parse_args()
    if arguments.memory:
        print(json.dumps({"in_flight": 10_000, "kib_each": round(memory_kib(10_000), 1)}))
        return
    peers = [Peer.find(item, "executor") for item in arguments.peer]
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # as `tandem rl` does
    folder = Path(tempfile.mkdtemp(prefix="executor-cost-"))
    bare_us(1000, 1000)
    for in_flight, batch in product(arguments.in_flight, arguments.batch):
        measure(arguments, in_flight, batch or in_flight, folder / f"{in_flight}-{batch}")
        if batch in (0, in_flight):
            for peer in peers:
                measure_peer(peer, arguments, in_flight)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
