"""Ten thousand conversations at once: turns a second, memory, and whether it stays flat.

Scripted completions of a few tokens, four turns an episode, batches handed over, trained on by
nobody, and kept in the durable store, whose size is bounded. Without ``--minutes`` as fast as it
goes for some batches; with it at ``--rate`` turns a second, a line of JSON every ten seconds.

    python benchmarks/rollout_soak.py
    python benchmarks/rollout_soak.py --minutes 30 --rate 500
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from tensordict import TensorDict

from tandem.config.schema import RolloutConfig
from tandem.inference.memory import rss_bytes
from tandem.inference.scripted import ScriptedOptions
from tandem.rollout import RolloutWorkflow, ScriptedInferenceEngine
from tandem.rollout.workflow import Episode
from tandem.store import STORE_FILE, SqliteStore, StoreWriter
from tandem.types import GenerationConfig, LLMRequest, Prompt, WeightVersion

NUM_TURNS = 4
ANSWER = [7, 7, 7, 2]
OBSERVATION = (5, 6)
REPORT_S = 10.0


class Conversation(RolloutWorkflow):
    """Four completions, each after what was said before; one row."""

    def __init__(self, generation: GenerationConfig) -> None:
        self.generation = generation
        self.num_turns = 0

    async def arun_episode(self, engine: Any, data: Mapping[str, Any]) -> TensorDict:
        episode = Episode.of(data)
        ids, versions = [3, 4], [-1, -1]
        for turn in range(NUM_TURNS):
            request = LLMRequest(f"{episode.uid}.{turn}", tuple(ids), self.generation.new(seed=0))
            response = await engine.agenerate(request)
            ids += [*response.output_tokens, *OBSERVATION]
            versions += [*response.output_versions, *(-1 for _ in OBSERVATION)]
            self.num_turns += 1
        versions_T = torch.tensor([versions])
        mask = versions_T >= 0
        return TensorDict(
            {
                "input_ids": torch.tensor([ids]),
                "attention_mask": torch.ones_like(mask),
                "loss_mask": mask,
                "logprobs": torch.zeros(mask.shape),
                "versions": versions_T,
                "rewards": torch.ones(1),
            },
            batch_size=[1],
        )


class Prompts:
    def __len__(self) -> int:
        return 1 << 30

    def prompt(self, epoch: int, position: int) -> Prompt:
        return Prompt(epoch, position, {"prompt_ids": (3, 4)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--in-flight", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=1_000)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--minutes", type=float, help="for so long, at --rate")
    parser.add_argument("--rate", type=float, default=500.0, help="turns a second, with --minutes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # as `tandem rl` does
    token_s = 0.0
    if arguments.minutes is not None:
        token_s = arguments.in_flight / arguments.rate / len(ANSWER)
    folder = Path(tempfile.mkdtemp(prefix="rollout-soak-"))
    try:
        run(arguments, token_s, folder)
    finally:
        shutil.rmtree(folder)


def run(arguments: argparse.Namespace, token_s: float, folder: Path) -> None:
    config = RolloutConfig(
        batch_size=arguments.batch,
        group_size=1,
        max_concurrent=arguments.in_flight,
        max_staleness=max(1, arguments.in_flight // arguments.batch),
        generation=GenerationConfig(max_new_tokens=len(ANSWER)),
        stale_policy="drop",
        episode_timeout_s=1e6,
        wait_timeout_s=1e6,
    )
    store = SqliteStore(folder / STORE_FILE)
    writer = StoreWriter(store, "soak")
    engine = ScriptedInferenceEngine(
        config, lambda ids, seed: ANSWER, options=ScriptedOptions(latency_s=token_s), writer=writer
    )
    engine.initialize()
    workflow, backend = Conversation(config.generation), engine.backend
    assert hasattr(backend, "_version")
    began = told = time.monotonic()
    turns = version = 0
    while True:
        engine.prepare_batch(Prompts(), workflow)
        version += 1
        backend._version = WeightVersion("soak", version)
        engine.set_version(version)
        store.retain(needed_from=version, keep_from=version - 2, max_bytes=64 << 20)
        now = time.monotonic()
        is_over = (
            version >= arguments.batches
            if arguments.minutes is None
            else now - began > 60 * arguments.minutes
        )
        if is_over or now - told > REPORT_S:
            figures = {
                "s": round(now - began, 1),
                "turns_per_s": round((workflow.num_turns - turns) / (now - told)),
                "rss_mb": round(rss_bytes() / 1e6),
                "in_flight": engine.executor.ledger.counts()["running"],
            }
            print(json.dumps(figures), flush=True)
            turns, told = workflow.num_turns, now
        if is_over:
            break
    engine.destroy()
    writer.close()
    store.close()


if __name__ == "__main__":
    main()
