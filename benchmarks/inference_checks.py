"""Parts of ``inference.py`` that are checks: start-up, greedy tokens, a long queue, and the pause
of a child process at an update of its weights.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tandem.config import InferenceConfig
from tandem.inference.embedded import ChildBackend
from tandem.inference.embedded.build import build_core
from tandem.inference.embedded.core import EmbeddedCore
from tandem.inference.memory import rss_bytes
from tandem.types import GenerationConfig, LLMRequest, LLMResponse, ParamSpec, WeightUpdateMeta
from tandem.weights import publish, release

CLOSE = 1e-4
"""Two best logits that lie nearer than this may be told apart by rounding."""
GENERATE = """
import asyncio, sys, time
from tandem.config import InferenceConfig
from tandem.inference.embedded import EmbeddedBackend
from tandem.types import GenerationConfig, LLMRequest
backend = EmbeddedBackend(InferenceConfig(mode="inprocess", dtype=sys.argv[2]), sys.argv[1], "b")
backend.start()
request = LLMRequest("0", tuple(range(5, 69)), GenerationConfig(max_new_tokens=1))
asyncio.run(backend.generate(request))
print("token", flush=True)
backend.close()
"""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table; ``met`` says whether the figure reaches the goal."""

    measure: str
    path: str
    figure: str
    goal: str
    met: bool
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> str:
        return Path(self.path).name

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "path": self.model, "met": "yes" if self.met else "no"}


def request(core: EmbeddedCore, index: int, prompt: int, new: int, **options: Any) -> LLMRequest:
    """Random ids that depend on ``index`` only."""
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(3, core.limits.vocab_size, (prompt,), generator=generator).tolist()
    config = GenerationConfig(max_new_tokens=new, ignore_eos=True, **{"seed": index, **options})
    return LLMRequest(str(index), tuple(ids), config)


def startup(path: str, options: argparse.Namespace) -> Iterator[Row]:
    """From the start of the interpreter to its end, or to its first token; an empty program's time
    is taken off imports."""
    commands = {
        "nothing": ["-c", "pass"],
        "import of tandem": ["-c", "import tandem"],
        "tandem --help": ["-m", "tandem", "--help"],
        "first token from a cold start": ["-c", GENERATE, path, options.dtype],
    }
    goals = {"import of tandem": 0.15, "tandem --help": 0.3, "first token from a cold start": 5.0}
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(options.repeats):
        for name, command in commands.items():
            times[name].append(_seconds([sys.executable, *command], first_line="token" in name))
    empty = min(times["nothing"])
    for name, goal in goals.items():
        taken = [item - empty if name == "import of tandem" else item for item in times[name]]
        middle = statistics.median(taken)
        text = f"{middle:.2f} s (least {min(taken):.2f})"
        yield Row(name, path, text, f"<= {goal} s", middle <= goal, {"seconds": taken})


def _seconds(command: list[str], *, first_line: bool) -> float:
    """Until a program ends, or until it prints its first line."""
    begun = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        output = cast("IO[str]", process.stdout)
        lines = [output.readline()] if first_line else output.readlines()
        if not first_line:
            process.wait()
        seconds = time.perf_counter() - begun
        output.read()
    assert process.returncode == 0
    assert not first_line or lines == ["token\n"]
    return seconds


def greedy(path: str, options: argparse.Namespace) -> Iterator[Row]:
    """Greedy tokens in fp32 beside ``generate``, prompt by prompt of 64 to 256 tokens."""
    core = build_core(InferenceConfig(), path, "bench")
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    theirs.generation_config.eos_token_id = None
    equal = close = compared = 0
    deadline = time.perf_counter() + options.limit
    numbers = range(options.first, options.first + options.prompts)
    for first in range(numbers.start, numbers.stop, 32):
        if time.perf_counter() > deadline:
            break
        requests = [
            request(core, number, 64 + number % 193, options.new, temperature=0.0)
            for number in range(first, min(first + 32, numbers.stop))
        ]
        made: dict[int, LLMResponse] = {}
        for ticket, item in enumerate(requests):
            core.add(ticket, item)
        while core.has_work:
            for done in core.step():
                assert isinstance(done.outcome, LLMResponse)
                made[done.ticket] = done.outcome
        for ticket, item in enumerate(requests):
            verdict = _same(theirs, item, made[ticket].output_tokens)
            equal, close, compared = equal + verdict[0], close + verdict[1], compared + 1
    text = f"{equal} of {compared} equal, {close} within {CLOSE:g}"
    details = {"equal": equal, "close": close, "compared": compared, "first": options.first}
    met = equal + close == compared and close <= 5
    name = f"greedy tokens, {options.new} new, prompts from {options.first} on"
    yield Row(name, path, text, "all; at most 5 close", met, details)


@torch.inference_mode()
def _same(model: Any, item: LLMRequest, ours: list[int]) -> tuple[bool, bool]:
    """Whether the tokens are equal; if not, whether the two best logits were close there."""
    ids = torch.tensor([item.input_ids])
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=len(ours),
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    expected = made.sequences[0, ids.shape[1] :].tolist()
    if expected == list(ours):
        return True, False
    at = next(i for i, (a, b) in enumerate(zip(ours, expected, strict=True)) if a != b)
    best = made.logits[at][0].topk(2).values
    return False, bool(best[0] - best[1] < CLOSE)


def queue(path: str, options: argparse.Namespace) -> Iterator[Row]:
    """2,000 requests on a cache of 50 requests' size."""
    prompt, new, total = 32, 16, 2000
    config = InferenceConfig(
        dtype=options.dtype,
        numerics=options.numerics,
        cache_tokens=50 * (prompt + new),
        max_context=prompt + new,
        prefix_cache_mib=16,
    )
    core = build_core(config, path, "bench")
    for index in range(total):
        core.add(index, request(core, index, prompt, new))
    finished, early, begun = 0, 0, time.perf_counter()
    while core.has_work:
        finished += sum(isinstance(item.outcome, LLMResponse) for item in core.step())
        if not early and finished >= total // 10:
            gc.collect()
            early = rss_bytes()
    core.check()
    seconds = time.perf_counter() - begun
    grown = (rss_bytes() - early) / 2**20
    text = f"{finished} finished, blocks accounted for, {grown:+.0f} MiB after the first tenth"
    details = {"finished": finished, "grown_mib": grown, "seconds": seconds}
    details["preempted"] = core.counters.preempted
    met = finished == total and grown < 64
    yield Row("2,000 queued on a cache of 50", path, text, "all, memory flat", met, details)


def swap_tokens(size_bytes: int) -> int:
    """New tokens of each request, so that all of them are under way for the whole of an update."""
    return 120 if size_bytes > 10**8 else 480


class Pauses:
    """Gaps between the tokens of requests that run through an update, over several updates.

    The first round added has no update: its gaps are the usual ones.
    """

    def __init__(self) -> None:
        self._usual: float | None = None
        self._undisturbed = 0.0
        self._longest: list[float] = []
        self._borders: list[float] = []
        self._filling: list[float] = []
        self._seconds: list[float] = []

    def took(self, seconds: float) -> None:
        """An update, from the hand-over of what was published to its commit."""
        self._seconds.append(seconds)

    def add(self, responses: list[LLMResponse]) -> None:
        """The responses of one round, whose prompts were complete before the update began."""
        if self._usual is None:
            self._usual = statistics.median(gap for item in responses for gap in item.itl)
            self._undisturbed = statistics.median(max(item.itl[SKIPPED:]) for item in responses)
            return
        firsts = [item.output_versions.index(max(item.output_versions)) for item in responses]
        assert all(SKIPPED + 1 < n < len(r.itl) for n, r in zip(firsts, responses, strict=True))
        pairs = list(zip(responses, firsts, strict=True))
        before = [item.itl[SKIPPED : first - 1] for item, first in pairs]
        self._filling += [gap for gaps in before for gap in gaps]
        self._longest.append(statistics.median(map(max, before)))
        self._borders.append(statistics.median(item.itl[first - 1] for item, first in pairs))

    def figures(self) -> dict[str, float]:
        """Medians over the updates. The longest gap without an update, the longest while the new
        weights were made ready, and the one at the border are those beyond the usual gap."""
        assert self._usual is not None
        return {
            "gap_ms": 1e3 * self._usual,
            "undisturbed_ms": 1e3 * (self._undisturbed - self._usual),
            "filling_ms": 1e3 * (statistics.median(self._longest) - self._usual),
            "border_ms": 1e3 * (statistics.median(self._borders) - self._usual),
            "gap_while_filling_ms": 1e3 * statistics.median(self._filling),
            "update_s": statistics.median(self._seconds),
        }


SKIPPED = 3
"""Gaps at the beginning of a request, when others are still being admitted."""


def copy_ms(tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        _ = [item.clone() for item in tensors.values()]
        times.append(time.perf_counter() - begun)
    return {"copy_ms": 1e3 * min(times)}


def swap_rows(where: str, kept: str, path: str, found: dict[str, float]) -> Iterator[Row]:
    """The recomputation of caches at the border is no part of the stall."""
    stall = found["filling_ms"]
    apart = f"then {found['border_ms']:.0f} to exchange them and recompute"
    if kept == "keep":
        stall = max(stall, found["border_ms"])
        apart = f"{found['border_ms']:.0f} to exchange them"
    usual = found["gap_while_filling_ms"] - found["gap_ms"]
    text = f"{stall:.0f} ms beyond a gap of {found['gap_ms']:.0f}, without a swap "
    text += f"{found['undisturbed_ms']:.0f} (usually {usual:.0f} for the {found['update_s']:.1f} s "
    text += f"that new weights are made ready, {apart})"
    met = stall <= found["gap_ms"] + 5
    yield Row(f"swap in {where}, {kept}", path, text, "<= a step + 5 ms", met, found)
    copied = found["copied"]
    name = f"bytes copied by a swap in {where}, of those of the weights"
    yield Row(name, path, f"{copied:.1f} x", "<= 2.5 x", copied <= 2.5)


def child_swap(path: str, options: argparse.Namespace) -> Iterator[Row]:
    """Updates through shared memory while 16 requests decode in a child process."""
    for kept in ("keep", "recompute"):
        found = asyncio.run(_child_swap(path, options, kept))
        yield from swap_rows("a child process", kept, path, found)


async def _child_swap(path: str, options: argparse.Namespace, kept: str) -> dict[str, float]:
    config = InferenceConfig(
        dtype=options.dtype,
        numerics=options.numerics,
        threads=options.threads,
        kv_on_update=kept,  # type: ignore[arg-type]
    )
    backend = ChildBackend(config, path, "bench")
    backend.start()
    dtype = torch.bfloat16 if options.dtype == "bfloat16" else torch.float32
    stored = load_file(Path(path) / "model.safetensors")
    tensors = {name: item.to(dtype).contiguous() for name, item in stored.items()}
    specs = [ParamSpec(n, tuple(t.shape), options.dtype) for n, t in tensors.items()]
    size = sum(item.nbytes for item in tensors.values())
    prompt = GenerationConfig(max_new_tokens=swap_tokens(size), ignore_eos=True)
    pauses = Pauses()
    try:
        for version in range(options.repeats + 1):
            meta = WeightUpdateMeta("shared_memory", version, incarnation="bench", channel="child")
            if version:
                publish(meta, specs, tensors.items())
            requests = [LLMRequest(str(i), tuple(range(5 + i, 37 + i)), prompt) for i in range(16)]
            before = backend.stats()["tokens"]
            running = [asyncio.ensure_future(backend.generate(item)) for item in requests]
            if version:
                while backend.stats()["tokens"] < before + 8 * len(requests):
                    await asyncio.sleep(0.01)
                begun = time.perf_counter()
                await asyncio.wrap_future(backend.update_weights(meta))
                pauses.took(time.perf_counter() - begun)
            pauses.add(await asyncio.gather(*running))
        copied = backend.stats()["weight_bytes"] / size
    finally:
        backend.close()
        release("child")
    return {**pauses.figures(), "copied": copied, **copy_ms(tensors)}


CHECKS: dict[str, Callable[[str, argparse.Namespace], Iterator[Row]]] = {
    "startup": startup,
    "greedy": greedy,
    "queue": queue,
    "child_swap": child_swap,
}
