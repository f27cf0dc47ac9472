"""What the peers' scripts of ``executor_cost.py`` share: the episode, its bare cost, the report.

Runs in the peer's own Python, so it needs nothing of Tandem. An episode is that of ours: it yields
to the loop once, calls a reward twice, makes two rows of 16 tokens. What the peer's own kind of
workflow must hand back is built by the caller, in the bare coroutine too.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from collections.abc import Awaitable, Callable

import torch

GROUP = 2
WIDTH = 16
PROMPT = 4


async def reward(completion: str, answer: str) -> float:
    return float(completion.strip() == answer)


def bare_us(episode: Callable[[], Awaitable[object]], count: int, in_flight: int) -> float:
    """The coroutines alone, ``in_flight`` at a time, in one event loop."""
    batches = max(1, count // in_flight)

    async def run() -> float:
        began = time.process_time()
        for _ in range(batches):
            await asyncio.gather(*[episode() for _ in range(in_flight)])
        return time.process_time() - began

    return asyncio.run(run()) / (batches * in_flight) * 1e6


def steps_us(step: Callable[[], None], count: int, in_flight: int) -> float:
    """Steps that take a batch of ``in_flight`` episodes each, after one that does not count."""
    step()
    steps = max(1, count // in_flight)
    began = time.process_time()
    for _ in range(steps):
        step()
    return (time.process_time() - began) / (steps * in_flight) * 1e6


def report(
    version: str,
    episode: Callable[[], Awaitable[object]],
    ways: dict[str, Callable[[int, int], float]],
) -> None:
    """Measure in turn what the command line asks for; print the least of the rounds.

    A way takes a number of episodes and how many are in flight; what one costs beyond ``episode``
    is printed as ``NAME_us``.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--in-flight", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # as ours
    bare_us(episode, 1000, 1000)
    for in_flight in arguments.in_flight:
        bare, least = [], {name: float("inf") for name in ways}
        for _ in range(arguments.rounds):
            bare.append(bare_us(episode, arguments.episodes, in_flight))
            for name, way in ways.items():
                least[name] = min(least[name], way(arguments.episodes, in_flight))
        result = {
            "version": version,
            "in_flight": in_flight,
            "bare_us": round(min(bare), 1),
            **{f"{name}_us": round(taken - min(bare), 1) for name, taken in least.items()},
        }
        print(json.dumps(result), flush=True)
