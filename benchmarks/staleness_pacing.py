"""What each staleness policy costs: tokens, time, and answers of which length.

An asynchronous run of the real executor over the scripted engine on a virtual clock. Training on a
batch takes 1.2 times as long as generating one; lengths have a long tail up to a cap of 9.6 times
their mean; ``max_staleness`` is 4. ``unbounded`` is the run without any bound, ``admission``
the one that admits by the rule and trains on whatever comes.

A decoder makes one token of every running answer a pass. Its pass takes either always the same time
(``fixed``: memory-bound) or longer the more answers run (``shared``: half of a full pass is there
with none). Both have the same speed with one batch running, whose generation takes, on average, the
time that training is compared to.

    python benchmarks/staleness_pacing.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from tensordict import TensorDict

from tandem.config.schema import RolloutConfig
from tandem.inference.scripted import ScriptedOptions
from tandem.rollout import RolloutWorkflow, ScriptedInferenceEngine, pipeline
from tandem.rollout.rows import Staleness, join_rows
from tandem.rollout.simulated import SimulatedRuntime
from tandem.rollout.staleness import StalenessLedger
from tandem.rollout.workflow import Episode, sample_seed
from tandem.testing.simulation import NumberedPrompts, rows_of
from tandem.types import GenerationConfig, LLMRequest, WeightVersion

MEAN, CAP_FACTOR, TRAIN_OVER_GENERATE, MAX_STALENESS = 20, 9.6, 1.2, 4
CAP = round(MEAN * CAP_FACTOR)
PASS_S = 0.01


def exponential(draw: random.Random) -> float:
    return draw.expovariate(1.0)


def log_normal(draw: random.Random) -> float:
    """Its sigma is 1 and its mean 1."""
    return draw.lognormvariate(-0.5, 1.0)


TAILS: dict[str, Callable[[random.Random], float]] = {
    "exponential": exponential,
    "log_normal": log_normal,
}


@dataclass
class Tally:
    """Tokens and times of one run after its first steps."""

    steps: int = 0
    began_s: float = 0.0
    generated: int = 0
    generated_lengths: int = 0
    trained: int = 0
    trained_lengths: int = 0
    violating: int = 0
    trajectories: int = 0
    over: int = 0
    masked: int = 0
    untrained: dict[int, int] = field(default_factory=dict)

    def made(self, episode_id: int, lengths: list[int]) -> None:
        self.untrained[episode_id] = sum(lengths)
        self.generated += sum(lengths)
        self.generated_lengths += sum(length * length for length in lengths)

    def wasted(self, open_ids: set[int]) -> float:
        """Share of tokens that were masked, or generated for an episode that was given up."""
        given_up = sum(n for key, n in self.untrained.items() if key not in open_ids)
        lost = given_up + self.masked
        return lost / (lost + self.trained)

    def trained_on(self, batch: TensorDict, version: int) -> None:
        mask, ages = batch["loss_mask"], version - batch["versions"]
        made_B = (batch["versions"] >= 0).sum(-1)
        self.masked += int(made_B.sum() - mask.sum())
        for episode_id in set(batch["episode_ids"].tolist()):
            self.untrained.pop(episode_id, None)
        self.trained += int(mask.sum())
        self.trained_lengths += int((mask.sum(-1) * made_B).sum())
        self.violating += int((mask & (ages > MAX_STALENESS)).sum())
        self.trajectories += len(made_B)
        old = (batch["versions"] >= 0) & (ages > MAX_STALENESS)
        self.over += int(old.any(-1).sum())


class Answers(RolloutWorkflow):
    """A group of answers; tells the tally how long they became."""

    def __init__(self, group_size: int, generation: GenerationConfig, tally: Tally) -> None:
        self.group_size, self.generation, self.tally = group_size, generation, tally

    async def arun_episode(self, engine: Any, data: Any) -> TensorDict:
        episode = Episode.of(data)
        seeds = [sample_seed(0, episode.episode_id, i) for i in range(self.group_size)]
        responses = await asyncio.gather(
            *[
                engine.agenerate(
                    LLMRequest(f"{episode.uid}.{i}", (3, 4), self.generation.new(seed=seed))
                )
                for i, seed in enumerate(seeds)
            ]
        )
        lengths = [len(item.output_tokens) for item in responses]
        self.tally.made(episode.episode_id, lengths)
        return rows_of(responses, random.Random(episode.episode_id))


def unchecked(episodes: Any, **_: Any) -> Any:
    return join_rows(episodes)[0], Staleness(0, 0.0, 0)


def simulate(policy: str, arguments: argparse.Namespace, tail: str, decoder: str) -> dict[str, Any]:
    """One run; figures of what came after its first tenth."""
    bounded = policy not in ("unbounded", "admission")
    config = RolloutConfig(
        batch_size=arguments.batch,
        group_size=arguments.group,
        max_concurrent=arguments.concurrent,
        max_staleness=MAX_STALENESS if policy != "unbounded" else 30,
        stale_policy=policy if bounded else "drop",  # type: ignore[arg-type]
        generation=GenerationConfig(max_new_tokens=CAP),
        episode_timeout_s=1e9,
        wait_timeout_s=1e9,
    )
    tally, runtime = Tally(), SimulatedRuntime()
    full = arguments.batch * arguments.group

    def script(prompt_ids: tuple[int, ...], seed: int | None) -> list[int]:
        length = max(1, round(MEAN * TAILS[tail](random.Random(seed))))
        return [7] * (min(length, CAP) - 1) + [2]

    def pass_s(request: LLMRequest) -> float:
        if decoder == "fixed":
            return PASS_S
        return PASS_S * (0.5 + 0.5 * backend._running / full)

    engine = ScriptedInferenceEngine(
        config, script, options=ScriptedOptions(latency_s=pass_s, clock=runtime), runtime=runtime
    )
    backend: Any = engine.backend
    engine.initialize()
    generate_s = MEAN * PASS_S
    train_s = arguments.ratio * generate_s
    workflow = Answers(arguments.group, config.generation, tally)
    with without_consumption_check(bounded):
        for version in range(arguments.steps):
            if version == arguments.steps // 10:
                fresh = Tally(began_s=runtime.now())
                tally.__dict__.update(fresh.__dict__)
            batch = engine.prepare_batch(NumberedPrompts(), workflow)
            tally.trained_on(batch, version)
            runtime.pass_time(train_s)
            backend._version = WeightVersion("simulated", version + 1)
            engine.set_version(version + 1)
            tally.steps += 1
    counts = engine.executor.ledger.counts()
    step_s = (runtime.now() - tally.began_s) / tally.steps
    open_share = sum(counts[name] for name in ("running", "ready")) / arguments.batch
    return {
        "policy": policy,
        "violating": tally.violating,
        "over_the_bound": tally.over / tally.trajectories,
        "wasted": tally.wasted(set(engine.executor.open_ids())),
        "step_s": step_s,
        "length_bias": (tally.trained_lengths / tally.trained)
        / (tally.generated_lengths / tally.generated)
        - 1,
        "reported_bias": engine.executor._pipeline.meters.lengths.bias,
        "open_batches": open_share,
        "running_limit": engine.executor.ledger.max_running,
    }


@contextmanager
def without_consumption_check(bounded: bool) -> Iterator[None]:
    """Nothing expires and nothing is masked, unless ``bounded``."""
    ledger, rows = cast("Any", StalenessLedger), cast("Any", pipeline)
    before = ledger.expired, rows.join_rows
    if not bounded:
        ledger.expired, rows.join_rows = (lambda self, version: []), unchecked
    try:
        yield
    finally:
        ledger.expired, rows.join_rows = before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--group", type=int, default=1)
    parser.add_argument("--concurrent", type=int, default=160, help="max_concurrent, in episodes")
    parser.add_argument("--ratio", type=float, default=TRAIN_OVER_GENERATE, help="train/generate")
    parser.add_argument("--tails", nargs="+", default=list(TAILS))
    parser.add_argument("--decoders", nargs="+", default=["fixed", "shared"])
    parser.add_argument("--policies", nargs="+", default=["drop", "mask", "wait", "pace"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    for tail in arguments.tails:
        for decoder in arguments.decoders:
            free_s = None
            for policy in ("unbounded", "admission", *arguments.policies):
                found = simulate(policy, arguments, tail, decoder)
                free_s = free_s or found["step_s"]
                found |= {"tail": tail, "decoder": decoder, "step": found["step_s"] / free_s}
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
