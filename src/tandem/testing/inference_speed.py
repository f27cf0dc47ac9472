"""How fast a model generates here, beside Hugging Face ``generate`` and vLLM, in one run.

The engines take turns on the same weights, prompts, lengths and threads, so that what else the
machine does meets all of them. Which figures to publish belongs to ``benchmarks/``.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tandem.config import InferenceConfig
from tandem.errors import ConfigError, EngineError
from tandem.inference.embedded import ChildBackend
from tandem.models.directories import quiet_transformers
from tandem.models.processor import bf16_products
from tandem.types import GenerationConfig, LLMRequest, LLMResponse

Prompts = Sequence[Sequence[int]]
WARM_UP_TOKENS = 4
SETTLE_S = 0.1
"""Between two turns: threads of an OpenMP library look for work for some milliseconds before they
sleep, and would take the next engine's core."""
VLLM_PEER = Path(__file__).with_name("vllm_peer.py")


@dataclass(frozen=True, slots=True)
class SpeedPlan:
    """What is measured; ``vllm`` is the python of an environment that has vLLM."""

    concurrent: tuple[int, ...] = (1, 8, 32, 64)
    prompt_tokens: int = 64
    new_tokens: int = 64
    repeats: int = 5
    threads: int = 1
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    numerics: Literal["matched", "fast"] = "fast"
    with_transformers: bool = True
    vllm: str | None = None
    limit_s: float | None = None
    """No new round begins after so many seconds."""


class Peer(Protocol):
    """Generates ``new_tokens`` tokens for every prompt at once; returns the seconds it took."""

    def run(self, prompts: Prompts, new_tokens: int) -> float: ...
    def close(self) -> None: ...


def measure_speed(
    model_dir: str, plan: SpeedPlan, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Tokens per second of every engine at every concurrency, with latencies of ours.

    Raises:
        ConfigError: the model cannot take prompts of this length.
        EngineError: vLLM did not start.
    """
    torch.set_num_threads(plan.threads)
    deadline = time.perf_counter() + (float("inf") if plan.limit_s is None else plan.limit_s)
    ours = EmbeddedPeer(model_dir, plan)
    peers: dict[str, Peer] = {"tandem": ours}
    try:
        if plan.with_transformers:
            peers["transformers"] = TransformersPeer(model_dir, plan)
        if plan.vllm is not None:
            peers["vllm"] = VLLMPeer(plan.vllm, model_dir, plan)
        rows = []
        for count in plan.concurrent:
            progress(f"{count} concurrent")
            rows.append(_measure(count, ours, peers, plan, deadline))
            progress(json.dumps(rows[-1]))
    finally:
        for peer in peers.values():
            peer.close()
    return {
        "model": model_dir,
        "weight_bytes": ours.weight_bytes,
        "read_weights_ms": round(1e3 * read_seconds(ours.weight_bytes), 2),
        "prompt_tokens": plan.prompt_tokens,
        "new_tokens": plan.new_tokens,
        "repeats": plan.repeats,
        "threads": plan.threads,
        "dtype": plan.dtype,
        "numerics": plan.numerics,
        "rows": rows,
    }


def _measure(
    count: int, ours: EmbeddedPeer, peers: Mapping[str, Peer], plan: SpeedPlan, deadline: float
) -> dict[str, Any]:
    """One short warm-up of each engine, then rounds in turn, each with prompts of its own."""
    rates: dict[str, list[float]] = {name: [] for name in peers}
    responses: list[LLMResponse] = []
    for repeat in range(plan.repeats + 1):
        if repeat > 1 and time.perf_counter() > deadline:
            break
        prompts = ours.prompts(count, plan.prompt_tokens, seed=1000 * count + repeat)
        for name, peer in peers.items():
            time.sleep(SETTLE_S)
            seconds = peer.run(prompts, plan.new_tokens if repeat else WARM_UP_TOKENS)
            if repeat:
                rates[name].append(count * plan.new_tokens / seconds)
        if repeat:
            responses += ours.responses
    row: dict[str, Any] = {"concurrent": count, "rounds": len(rates["tandem"])}
    row["latency"] = latencies(responses)
    if isinstance(theirs := peers.get("transformers"), TransformersPeer):
        row["transformers_dtype"] = theirs.dtypes[count == 1]
    for name, found in rates.items():
        row[name] = {
            "max_tokens_per_s": round(max(found), 1),
            "median_tokens_per_s": round(statistics.median(found), 1),
        }
        if name != "tandem":
            pairs = zip(rates["tandem"], found, strict=True)
            ratios = [a / b for a, b in pairs]
            row[f"over_{name}"] = round(statistics.median(ratios), 2)
            row[f"over_{name}_min"] = round(min(ratios), 2)
    return row


def latencies(responses: Sequence[LLMResponse]) -> dict[str, float]:
    """Percentiles in milliseconds of whole requests, first tokens and gaps between tokens."""
    samples = {
        "request": [item.latency for item in responses],
        "first_token": [item.ttft for item in responses],
        "gap": [gap for item in responses for gap in item.itl],
    }
    return {
        f"{name}_p{percent}_ms": round(1e3 * float(np.percentile(values, percent)), 2)
        for name, values in samples.items()
        if values
        for percent in (50, 95, 99)
    }


def read_seconds(size_bytes: int, repeats: int = 5) -> float:
    """Time to read a buffer of this size once: what a decoding step of one row cannot beat."""
    buffer = torch.ones(max(1, size_bytes // 8), dtype=torch.int64)
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        buffer.sum()
        times.append(time.perf_counter() - begun)
    return min(times)


class EmbeddedPeer:
    """The engine of this library, in a child process as in a run."""

    def __init__(self, model_dir: str, plan: SpeedPlan) -> None:
        config = InferenceConfig(
            threads=plan.threads,
            dtype=plan.dtype,
            numerics=plan.numerics,
            max_batch_size=max(plan.concurrent),
        )
        self._backend = ChildBackend(config, model_dir, "bench")
        self._backend.start()
        with quiet_transformers():
            stored = AutoModelForCausalLM.from_pretrained(model_dir, dtype=plan.dtype)
        self.weight_bytes = sum(p.numel() * p.element_size() for p in stored.parameters())
        text = stored.config.get_text_config()
        self._vocab_size = int(text.vocab_size)
        longest = getattr(text, "max_position_embeddings", None)
        if longest is not None and plan.prompt_tokens + plan.new_tokens > longest:
            self.close()
            raise ConfigError(
                f"prompts of {plan.prompt_tokens} and {plan.new_tokens} new tokens exceed the "
                f"model's context of {longest}; ask for fewer"
            )
        self.responses: list[LLMResponse] = []

    def prompts(self, count: int, length: int, *, seed: int) -> list[list[int]]:
        """Random ids: no prompt begins like another, so nothing is shared."""
        generator = torch.Generator().manual_seed(seed)
        ids: list[list[int]] = torch.randint(
            3, self._vocab_size, (count, length), generator=generator
        ).tolist()
        return ids

    def run(self, prompts: Prompts, new_tokens: int) -> float:
        requests = [
            LLMRequest(
                str(index),
                tuple(ids),
                GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, seed=index),
            )
            for index, ids in enumerate(prompts)
        ]

        async def all_of_them() -> list[LLMResponse]:
            return await asyncio.gather(*(self._backend.generate(item) for item in requests))

        begun = time.perf_counter()
        self.responses = asyncio.run(all_of_them())
        return time.perf_counter() - begun

    def close(self) -> None:
        self._backend.close()


class TransformersPeer:
    """``model.generate`` on one padded batch, with its default cache and attention.

    Where bfloat16 is emulated, more than one prompt is generated for in float32, as its user would.
    """

    def __init__(self, model_dir: str, plan: SpeedPlan) -> None:
        is_slow = plan.dtype == "bfloat16" and bf16_products() == "emulated"
        counts = {count == 1 for count in plan.concurrent}
        self.dtypes = {one: "float32" if is_slow and not one else plan.dtype for one in counts}
        """By whether there is one prompt."""
        with quiet_transformers():
            self._models = {
                dtype: AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()
                for dtype in set(self.dtypes.values())
            }
        for model in self._models.values():
            model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def run(self, prompts: Prompts, new_tokens: int) -> float:
        ids = torch.tensor(prompts)
        model = self._models[self.dtypes[len(prompts) == 1]]
        begun = time.perf_counter()
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )
        seconds = time.perf_counter() - begun
        assert made.shape[1] == ids.shape[1] + new_tokens
        return seconds

    def close(self) -> None:
        self._models.clear()


class VLLMPeer:
    """vLLM's offline engine in processes of its own environment; it answers line by line.

    They stand still between turns, because they look for work without a pause.
    """

    def __init__(self, python: str, model_dir: str, plan: SpeedPlan) -> None:
        settings = {
            "model": str(Path(model_dir).resolve()),
            "dtype": plan.dtype,
            "max_model_len": plan.prompt_tokens + plan.new_tokens,
            "max_num_seqs": max(plan.concurrent),
        }
        cores = sorted(os.sched_getaffinity(0))[: plan.threads]
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        }
        try:
            self._process = subprocess.Popen(
                [python, str(VLLM_PEER), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"vllm {python!r}: {error.strerror}; name a python") from None
        try:
            self._answer()
        except EngineError:
            self.close()
            raise
        os.killpg(self._process.pid, signal.SIGSTOP)

    def run(self, prompts: Prompts, new_tokens: int) -> float:
        assert self._process.stdin is not None
        os.killpg(self._process.pid, signal.SIGCONT)
        print(
            json.dumps({"prompts": prompts, "new_tokens": new_tokens}),
            file=self._process.stdin,
            flush=True,
        )
        seconds = float(self._answer()["seconds"])
        os.killpg(self._process.pid, signal.SIGSTOP)
        return seconds

    def close(self) -> None:
        """It ends with its input."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGCONT)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(f"vLLM ended with exit code {self._process.wait()}; see its messages")
        answer: dict[str, Any] = json.loads(line)
        return answer
