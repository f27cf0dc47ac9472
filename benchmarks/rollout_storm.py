"""A million events a seed: asynchronous runs with kills, stragglers and duplicates, simulated.

The executor, the ledger, the journal, the store, the feed and the scripted engine are the real
ones, on a virtual clock in one thread (``tandem.testing.simulation``). An independent book checks
every transition and every batch; the first broken rule ends the script with its message. One line
of JSON a seed; ``--mutate`` takes the consumption check away, which must end in a violation.

    python benchmarks/rollout_storm.py --seeds 0-99 --events 1000000
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import sys
import time
from dataclasses import asdict
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from tandem.rollout import pipeline
from tandem.rollout.rows import Staleness, join_rows
from tandem.rollout.staleness import StalenessLedger
from tandem.testing.simulation import Report, Scenario, Simulation, scenario

POLICIES = ("wait", "drop", "mask", "pace")


def drawn(seed: int, num_events: int) -> Scenario:
    """Sizes, bounds and speeds that are a function of the seed."""
    draw = random.Random(f"storm {seed}")
    batch_size = draw.choice([1, 2, 4, 8])
    max_staleness = draw.choice([0, 1, 1, 2, 4])
    return scenario(
        stale_policy=POLICIES[seed % len(POLICIES)],
        max_staleness=max_staleness,
        batch_size=batch_size,
        group_size=draw.choice([1, 2, 4]),
        max_concurrent=draw.choice([1, 2, 3, 6]) * batch_size,
        train_s=draw.choice([0.02, 0.1, 0.4]),
        kill_every=draw.choice([1_000, 5_000, 20_000]),
        num_events=num_events,
    )


def without_the_consumption_check() -> None:
    """Admission alone: nothing expires, nothing is masked, nobody asks."""

    def unchecked(episodes: Any, **_: Any) -> Any:
        return join_rows(episodes)[0], Staleness(0, 0.0, 0)

    ledger: Any = StalenessLedger
    ledger.expired = lambda self, version: []
    ledger.select = lambda self, count, version, hold=False: _first_ready(self, count)
    pipeline.join_rows = unchecked


def _first_ready(ledger: Any, count: int) -> list[int] | None:
    ready = ledger.ids("ready")
    return ready[:count] if len(ready) >= count else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0-99", help="FIRST-LAST")
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--mutate", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # publishing fails on purpose, again and again
    if arguments.mutate:
        without_the_consumption_check()
    first, _, last = arguments.seeds.partition("-")
    for seed in range(int(first), int(last or first) + 1):
        began = time.process_time()
        try:
            report: Report = Simulation(drawn(seed, arguments.events), seed).run()
        except AssertionError as error:
            print(json.dumps({"seed": seed, "broken": str(error)}), flush=True)
            return 1
        taken = time.process_time() - began
        figures = asdict(report) | {"events_per_s": round(report.num_events / taken)}
        print(json.dumps({"seed": seed, **figures}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
