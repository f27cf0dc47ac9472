"""The embedded engine beside its peers, its limits and its goals: one table.

    python benchmarks/inference.py MODEL_DIR --threads 2 --json inference.json
    python benchmarks/inference.py MODEL_DIR --only speed --counts 64 --json inference.json
    python benchmarks/inference.py --only startup,greedy MODEL_DIR --json inference.json

Parts: ``speed`` (tokens/s beside ``generate``, or with ``--vllm PYTHON`` beside vLLM), ``step``
(one request over reading the weights; what is not the forward pass of a step of 64), ``group``
(prefill work of the samples of one prompt), ``ragged`` (continuous over static batching), ``swap``
(pause of running requests at an update of the weights), and those of ``inference_checks``. Parts
that compare take turns. Rows of earlier calls in the same JSON file stay in the table, so that one
part can be measured at a time; no part begins a round after ``--limit`` seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from queue import Queue
from typing import Any

import numpy as np
import torch
from inference_checks import (
    CHECKS,
    Pauses,
    Row,
    copy_ms,
    request,
    swap_rows,
    swap_tokens,
)
from machine import machine, parser

from tandem.config import InferenceConfig
from tandem.inference.embedded.build import build_core
from tandem.inference.embedded.core import EmbeddedCore
from tandem.inference.embedded.filler import WeightFiller
from tandem.inference.embedded.loop import CoreLoop
from tandem.inference.embedded.recorded import WARM_PASSES
from tandem.testing.inference_speed import SpeedPlan, measure_speed, read_seconds
from tandem.types import GenerationConfig, LLMRequest, LLMResponse, ParamSpec, WeightUpdateMeta
from tandem.weights import expect, publish, release


def drain(core: EmbeddedCore) -> float:
    begun = time.perf_counter()
    while core.has_work:
        core.step()
    return time.perf_counter() - begun


def overhead(core: EmbeddedCore, rows: int, steps: int) -> dict[str, Any]:
    """Sampling and bookkeeping of decoding steps, beside their forward passes."""
    for index in range(rows):
        core.add(index, request(core, index, 64, steps + 2 * WARM_PASSES + 20))
    while core.num_waiting or core._lanes.cached.min() == 0:
        core.step()
    for _ in range(2 * WARM_PASSES):
        core.step()
    forward = core._runner.run
    inside: list[float] = []

    def timed(*arguments: Any) -> Any:
        begun = time.perf_counter()
        output = forward(*arguments)
        inside.append(time.perf_counter() - begun)
        return output

    core._runner.run = timed  # type: ignore[method-assign]
    whole = []
    for _ in range(steps):
        begun = time.perf_counter()
        core.step()
        whole.append(time.perf_counter() - begun)
    core._runner.run = forward  # type: ignore[method-assign]
    core.abort_all()
    shares = [1 - a / b for a, b in zip(inside, whole, strict=True)]
    return {
        "rows": rows,
        "step_min_ms": round(1e3 * min(whole), 2),
        "step_median_ms": round(1e3 * statistics.median(whole), 2),
        "share_median": round(statistics.median(shares), 3),
    }


def group(core: EmbeddedCore, size: int, prompt: int) -> dict[str, Any]:
    """Prompt tokens computed for ``size`` samples that come all at once, or one a step."""
    figures: dict[str, Any] = {"size": size, "prompt": prompt}
    for name, together in (("at_once", True), ("one_a_step", False)):
        before = core.counters.prefill_tokens
        ids = request(core, 7 * size + together, prompt, 1).input_ids
        for sample in range(size):
            core.add(sample, LLMRequest("g", ids, GenerationConfig(max_new_tokens=24, seed=sample)))
            if not together:
                core.step()
        drain(core)
        computed = core.counters.prefill_tokens - before
        figures[name] = round(computed / prompt, 3)
    return figures


def ragged(
    core: EmbeddedCore, rows: int, rounds: int, repeats: int, limit_s: float
) -> dict[str, Any]:
    """Log-normal lengths: useful tokens/s of continuous over static batches, in turn.

    All rows of a static batch go on to the end of its longest, as in ``generate``.
    """
    lengths = np.random.default_rng(0).lognormal(3.9, 0.8, rows * rounds).clip(4, 400).astype(int)

    def add(index: int, length: int) -> None:
        core.add(index, request(core, index, 16, length))

    def continuous() -> float:
        for index, length in enumerate(lengths.tolist()):
            add(index, length)
        return drain(core)

    def static() -> float:
        seconds = 0.0
        for first in range(0, len(lengths), rows):
            longest = int(lengths[first : first + rows].max())
            for index in range(first, first + rows):
                add(index, longest)
            seconds += drain(core)
        return seconds

    deadline, pairs = time.perf_counter() + limit_s, [(continuous(), static())]
    while len(pairs) < repeats and time.perf_counter() < deadline:
        pairs.append((continuous(), static()))
    batches = lengths.reshape(rounds, rows)
    return {
        "rows": rows,
        "rounds": len(pairs),
        "max_over_mean_length": round(float(batches.max(1).sum() / batches.mean(1).sum()), 3),
        "continuous_over_static": round(statistics.median(b / a for a, b in pairs), 3),
        "continuous_tokens_per_s": round(int(lengths.sum()) / min(a for a, _ in pairs), 1),
    }


def swap(core: EmbeddedCore, rows: int, repeats: int) -> dict[str, float]:
    """Updates from this process's memory while ``rows`` requests decode in this thread."""
    inbox: Queue[LLMResponse] = Queue()
    failures: list[Exception] = []
    loop = CoreLoop(
        core,
        deliver=lambda done: [inbox.put(item.outcome) for item in done],  # type: ignore[arg-type, func-returns-value]
        die=failures.append,
    )
    filler = WeightFiller(core, loop)
    tensors = {name: item.detach().clone() for name, item in core.weights.parameters.items()}
    specs = [ParamSpec(n, tuple(t.shape), str(t.dtype)[6:]) for n, t in tensors.items()]
    size = sum(item.nbytes for item in tensors.values())
    pauses = Pauses()

    def one_round(version: int) -> None:
        meta = WeightUpdateMeta("inprocess", version, incarnation="bench", channel="bench")
        if version:
            arrival = expect(meta)
            publish(meta, specs, tensors.items())
        loop.submit([(i, request(core, i, 64, swap_tokens(size))) for i in range(rows)])
        if version:
            before = loop.stats()["tokens"]
            while loop.stats()["tokens"] < before + 8 * rows:
                time.sleep(0.01)
            begun = time.perf_counter()
            filler.commit(arrival.result(0)).result()
            pauses.took(time.perf_counter() - begun)
        pauses.add([inbox.get() for _ in range(rows)])

    def drive() -> None:
        try:
            for version in range(repeats + 1):
                one_round(version)
        finally:
            loop.close()

    driver = threading.Thread(target=drive)
    driver.start()
    loop.run()
    driver.join()
    filler.close()
    release("bench")
    if failures:
        raise failures[0]
    return {**pauses.figures(), "copied": core.weights.size_bytes / size, **copy_ms(tensors)}


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("models", nargs="*", help="model directories")
    arguments.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    arguments.add_argument("--numerics", choices=("matched", "fast"), default="fast")
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--counts", default="1,8,32,64", help="concurrent requests of speed")
    arguments.add_argument("--limit", type=float, default=240.0, help="seconds of a part")
    arguments.add_argument("--prompt", type=int, default=64)
    arguments.add_argument("--new", type=int, default=64)
    arguments.add_argument("--prompts", type=int, default=500, help="of the greedy comparison")
    arguments.add_argument(
        "--first", type=int, default=0, help="greedy: number of the first prompt"
    )
    arguments.add_argument("--vllm", help="python of an environment that has vLLM")
    arguments.add_argument("--only", default=",".join((*PARTS, *CHECKS)))
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    rows: dict[str, dict[str, Any]] = {}
    if options.json is not None and options.json.exists():
        rows = json.loads(options.json.read_text(encoding="utf-8"))["rows"]
    for path in options.models:
        for part in options.only.split(","):
            for row in {**PARTS, **CHECKS}[part](path, options):
                rows[f"{row.measure}, {row.model}"] = row.to_json()
                if options.json is not None:
                    record = {"machine": machine(), "rows": rows}
                    options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(machine()))
    print("| measure | figure | goal | met |\n|---|---|---|---|")
    for name, item in rows.items():
        print(f"| {name} | {item['figure']} | {item['goal']} | {item['met']} |")


def make(path: str, options: argparse.Namespace, **changes: Any) -> EmbeddedCore:
    config = InferenceConfig(dtype=options.dtype, numerics=options.numerics, **changes)
    return build_core(config, path, "bench")


def measure_rates(path: str, options: argparse.Namespace) -> Iterator[Row]:
    peer = "vllm" if options.vllm else "transformers"
    plan = SpeedPlan(
        concurrent=tuple(map(int, options.counts.split(","))),
        prompt_tokens=options.prompt,
        new_tokens=options.new,
        repeats=options.repeats,
        threads=options.threads,
        dtype=options.dtype,
        numerics=options.numerics,
        with_transformers=options.vllm is None,
        vllm=options.vllm,
        limit_s=options.limit,
    )
    for row in measure_speed(path, plan, progress=print)["rows"]:
        count, ratio = row["concurrent"], row[f"over_{peer}"]
        goal = GOALS[peer][count > 8]
        yield Row(
            f"tokens/s at {count}, over {peer}",
            path,
            f"{row['tandem']['median_tokens_per_s']:.0f}: {ratio:.2f} x "
            f"(least {row[f'over_{peer}_min']:.2f} of {row['rounds']})",
            f">= {goal} x",
            ratio >= goal,
            row,
        )


GOALS = {"transformers": (1.4, 2.5), "vllm": (1.3, 1.0)}
"""At up to 8 and at more concurrent requests."""


def measure_step(path: str, options: argparse.Namespace) -> Iterator[Row]:
    core = make(path, options)
    size = sum(item.numel() * item.element_size() for item in core.weights.parameters.values())
    found = overhead(core, 1, 8 * options.repeats)
    read = 1e3 * read_seconds(size, options.repeats)
    ratio = found["step_min_ms"] / read
    text = f"{ratio:.2f} ({found['step_min_ms']} over {read:.1f} ms)"
    details = {**found, "read_ms": read}
    yield Row(
        "step of one request over one read of the weights",
        path,
        text,
        "<= 2.0",
        ratio <= 2,
        details,
    )
    found = overhead(core, 64, 8 * options.repeats)
    share = found["share_median"]
    text = f"{share:.1%} of {found['step_median_ms']} ms"
    yield Row("sampling and bookkeeping at 64", path, text, "<= 10 %", share <= 0.1, found)


def measure_group(path: str, options: argparse.Namespace) -> Iterator[Row]:
    for size in (8, 16):
        found = group(make(path, options), size, 512)
        text = f"{found['at_once']} at once, {found['one_a_step']} one a step"
        met = max(found["at_once"], found["one_a_step"]) <= 1.15
        yield Row(f"prefill work of {size} samples over one", path, text, "<= 1.15", met, found)


def measure_ragged(path: str, options: argparse.Namespace) -> Iterator[Row]:
    core = make(path, options, max_batch_size=32)
    found = ragged(core, 32, 48, options.repeats, options.limit)
    ratio = found["continuous_over_static"] / found["max_over_mean_length"]
    text = f"{ratio:.2f} ({found['continuous_over_static']} of {found['max_over_mean_length']})"
    yield Row("ragged lengths, of max/mean", path, text, ">= 0.9", ratio >= 0.9, found)


def measure_swap(path: str, options: argparse.Namespace) -> Iterator[Row]:
    for kept in ("keep", "recompute"):
        found = swap(make(path, options, kv_on_update=kept), 16, options.repeats)
        yield from swap_rows("one process", kept, path, found)


PARTS: dict[str, Callable[[str, argparse.Namespace], Iterator[Row]]] = {
    "speed": measure_rates,
    "step": measure_step,
    "group": measure_group,
    "ragged": measure_ragged,
    "swap": measure_swap,
}


if __name__ == "__main__":
    main()
