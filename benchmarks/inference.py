"""The embedded engine beside its peers and beside its own limits.

    python benchmarks/inference.py models/smollm2 --threads 2 --json inference.json
    python benchmarks/inference.py MODEL_DIR --dtype float32 --only swap,group

Parts: ``speed`` (as ``tandem bench inference``), ``overhead`` (share of a step that is not the
forward pass), ``group`` (prefill work of the samples of one prompt), ``ragged`` (continuous over
static batching), ``swap`` (pause of running requests at an update of the weights). Every part runs
in this process; parts that compare take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from machine import parser, report

from tandem.config import InferenceConfig
from tandem.inference.embedded.build import build_core
from tandem.inference.embedded.core import EmbeddedCore
from tandem.inference.embedded.weights import commit
from tandem.testing.inference_speed import SpeedPlan, measure_speed
from tandem.types import GenerationConfig, LLMRequest, ParamSpec, WeightUpdateMeta
from tandem.weights import expect, publish, release


def request(core: EmbeddedCore, index: int, prompt: int, new: int, **options: Any) -> LLMRequest:
    """Random ids that depend on ``index`` only."""
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(3, core.limits.vocab_size, (prompt,), generator=generator).tolist()
    config = GenerationConfig(max_new_tokens=new, ignore_eos=True, **{"seed": index, **options})
    return LLMRequest(str(index), tuple(ids), config)


def drain(core: EmbeddedCore) -> float:
    begun = time.perf_counter()
    while core.has_work:
        core.step()
    return time.perf_counter() - begun


def overhead(core: EmbeddedCore, rows: int, steps: int) -> dict[str, Any]:
    """Sampling and bookkeeping of decoding steps, beside their forward passes."""
    for index in range(rows):
        core.add(index, request(core, index, 64, steps + 20))
    while core.num_waiting or core._lanes.cached.min() == 0:
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


def ragged(core: EmbeddedCore, rows: int, rounds: int, repeats: int) -> dict[str, Any]:
    """Log-normal lengths: useful tokens/s of continuous over static batches, in turn."""
    lengths = np.random.default_rng(0).lognormal(3.5, 0.8, rows * rounds).clip(4, 400).astype(int)

    def add(index: int) -> None:
        core.add(index, request(core, index, 32, int(lengths[index])))

    def continuous() -> float:
        for index in range(len(lengths)):
            add(index)
        return drain(core)

    def static() -> float:
        seconds = 0.0
        for first in range(0, len(lengths), rows):
            for index in range(first, first + rows):
                add(index)
            seconds += drain(core)
        return seconds

    pairs = [(continuous(), static()) for _ in range(repeats)]
    batches = lengths.reshape(rounds, rows)
    return {
        "rows": rows,
        "max_over_mean_length": round(float(batches.max(1).sum() / batches.mean(1).sum()), 3),
        "continuous_over_static": round(statistics.median(b / a for a, b in pairs), 3),
        "continuous_tokens_per_s": round(int(lengths.sum()) / min(a for a, _ in pairs), 1),
    }


def swap(make: Callable[..., EmbeddedCore], rows: int, repeats: int) -> dict[str, Any]:
    """Commit of an in-process update in the middle of decoding, beside a copy of the bytes."""
    return {kept: _swap(make(kv_on_update=kept), rows, repeats) for kept in ("keep", "recompute")}


def _swap(core: EmbeddedCore, rows: int, repeats: int) -> dict[str, float]:
    for index in range(rows):
        core.add(index, request(core, index, 64, 40 * (repeats + 1)))
    for _ in range(4):
        core.step()
    tensors = {name: item.detach().clone() for name, item in core.parameters().items()}
    specs = [ParamSpec(n, tuple(t.shape), str(t.dtype)[6:]) for n, t in tensors.items()]
    stalls, copies, steps, firsts = [], [], [], []
    for version in range(1, repeats + 1):
        meta = WeightUpdateMeta("inprocess", version, incarnation="bench", channel="bench")
        arrival = expect(meta)
        publish(meta, specs, tensors.items())
        published = arrival.result(0)
        stalls.append(_seconds(commit, core, published))
        copies.append(_seconds(lambda: [item.clone() for item in tensors.values()]))
        firsts.append(_seconds(core.step))
        steps += [_seconds(core.step) for _ in range(8)]
    release("bench")
    core.abort_all()
    return {
        "commit_min_ms": round(1e3 * min(stalls), 2),
        "copy_min_ms": round(1e3 * min(copies), 2),
        "step_median_ms": round(1e3 * statistics.median(steps), 2),
        "step_after_median_ms": round(1e3 * statistics.median(firsts), 2),
    }


def _seconds(function: Callable[..., Any], *arguments: Any) -> float:
    begun = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - begun


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("models", nargs="+", help="model directories")
    arguments.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    arguments.add_argument("--numerics", choices=("matched", "fast"), default="fast")
    arguments.add_argument("--compile", choices=("auto", "off", "on"), default="off")
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--prompt", type=int, default=64)
    arguments.add_argument("--new", type=int, default=64)
    arguments.add_argument("--vllm", help="python of an environment that has vLLM")
    arguments.add_argument("--only", default="speed,overhead,group,ragged,swap")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    parts = options.only.split(",")
    report({path: measure(path, parts, options) for path in options.models}, options.json)


def measure(path: str, parts: list[str], options: Any) -> dict[str, Any]:
    def make(**changes: Any) -> EmbeddedCore:
        config = InferenceConfig(
            dtype=options.dtype, numerics=options.numerics, compile=options.compile, **changes
        )
        return build_core(config, path, "bench")

    figures: dict[str, Any] = {}
    if "speed" in parts:
        plan = SpeedPlan(
            prompt_tokens=options.prompt,
            new_tokens=options.new,
            repeats=options.repeats,
            threads=options.threads,
            dtype=options.dtype,
            numerics=options.numerics,
            compile=options.compile,
            vllm=options.vllm,
        )
        figures["speed"] = measure_speed(path, plan, progress=print)
    if "overhead" in parts:
        figures["overhead"] = overhead(make(), 64, 40)
    if "group" in parts:
        figures["group"] = [group(make(), size, 512) for size in (8, 16)]
    if "ragged" in parts:
        figures["ragged"] = ragged(make(), 32, 6, max(2, options.repeats // 2))
    if "swap" in parts:
        figures["swap"] = swap(make, 16, options.repeats)
    return figures


if __name__ == "__main__":
    main()
