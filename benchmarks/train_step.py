"""One training step: ``train_batch`` beside a loop written by hand, and what it makes of the CPU.

    python benchmarks/train_step.py --threads 2 --json train_step.json
    python benchmarks/train_step.py --size 4m --parts step --threads 1
    python benchmarks/train_step.py --parts peers --peer trl=TRL/bin/python verl=VERL/bin/python

Parts, each a comparison whose sides take turns:

- ``step``: against the loop written by hand, at equal and at log-normal lengths. At log-normal ones
  that loop runs padded and packed with a dense mask; the faster of the two counts.
- ``mfu``: arithmetic of the step as a share of a matrix product's, in fp32 and in bf16.
- ``packing``: how much faster than padded to the longest row, over how much less there is to do.
- ``ranks``: the same global batch on one and on two processes of one thread each.
- ``scaling``: time against sequence length and against batch size, with the log-log slope.
- ``loop``: the whole training loop of ``tandem sft`` against a loop written by hand.
- ``peers``: a step of TRL, AReaL and verl beside the loop written by hand, each in its own Python.
"""

from __future__ import annotations

import json
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from hand_loop import LR, MAX_NORM, HandLoop
from machine import parser, report
from peer import Peer
from random_models import SIZES, model_config, save_model, training_flops
from tensordict import TensorDict
from timing import Pair, ratio, summary, take_turns, timed
from torch import Tensor
from training_loop import measure_loop

from tandem.algorithms.sft import sft_loss
from tandem.config import ParallelConfig, TrainConfig
from tandem.data.batch import collate
from tandem.data.packing import cut_microbatches
from tandem.errors import ConfigError
from tandem.train import EngineRegistry, TrainEngine

PARTS = ("step", "mfu", "packing", "ranks", "scaling", "loop", "peers")
MEAN_LENGTH, SIGMA = 200, 1.0


def equal_lengths(num_tokens: int, length: int) -> list[int]:
    return [length] * (num_tokens // length)


def log_normal_lengths(num_tokens: int, cap: int, mean: int) -> list[int]:
    """About ``num_tokens`` in rows of log-normal lengths of this mean, none longer than ``cap``."""
    draw, lengths = random.Random(0), []
    while sum(lengths) < num_tokens:
        length = draw.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA)
        lengths.append(max(2, min(cap, round(length))))
    return lengths


def make_rows(lengths: Sequence[int], vocab_size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (length,), generator=generator) for length in lengths]


def make_batch(rows: Sequence[Tensor], num_trained: int | None = None) -> TensorDict:
    """Every token after the first of its row is trained on, token-mean."""
    masks = [torch.arange(len(row)) > 0 for row in rows]
    weight = 1.0 / (num_trained or sum(int(mask.sum()) for mask in masks))
    return collate(
        [
            {"input_ids": row, "loss_mask": mask, "loss_weights": weight * mask.float()}
            for row, mask in zip(rows, masks, strict=True)
        ]
    )


def open_engine(
    model_path: str, *, cap: int, bfloat16: bool = False, backend: str = "local", once: bool = False
) -> TrainEngine:
    """``once``: ranks gather weights and reduce gradients once a step, not every micro-batch."""
    config = TrainConfig(
        backend=backend,
        parallel=ParallelConfig(gather_per_microbatch=not once, reduce_per_microbatch=not once),
        device="cpu",
        dtype="bfloat16" if bfloat16 else "float32",
        lr=LR,
        max_grad_norm=MAX_NORM,
        max_tokens_per_microbatch=cap,
    )
    engine = EngineRegistry.new("language_model", backend, config=config, model_path=model_path)
    engine.initialize()
    return engine


class Sides:
    """``train_batch`` and the loop written by hand on the same rows, from the same weights."""

    def __init__(self, model_path: str, lengths: list[int], *, cap: int, bfloat16: bool) -> None:
        self.engine = open_engine(model_path, cap=cap, bfloat16=bfloat16)
        self.hand = HandLoop(model_path, bfloat16=bfloat16)
        self.rows = make_rows(lengths, self.engine.model.config.vocab_size)
        self.batch = make_batch(self.rows)
        self.plan = cut_microbatches(lengths, max_tokens=cap)
        ours, theirs = self.ours(), self.padded()
        if abs(ours - theirs) > 5e-2:
            raise RuntimeError(f"the two do not train alike: loss {ours} and {theirs}")

    def ours(self) -> float:
        return self.engine.train_batch(self.batch, sft_loss)["loss"]

    def padded(self) -> float:
        return self.hand.step_padded(self.rows, self.plan)

    def packed(self) -> float:
        return self.hand.step_packed(self.rows, self.plan)


# --- parts --------------------------------------------------------------------------------------


def measure_step(model_path: str, options: Any) -> dict[str, Any]:
    figures = {}
    shapes = {
        "equal": equal_lengths(options.tokens, options.length),
        "log_normal": log_normal_lengths(options.tokens, options.cap, options.mean),
    }
    for name, lengths in shapes.items():
        sides = Sides(model_path, lengths, cap=options.cap, bfloat16=options.bfloat16)
        functions: dict[str, Callable[[], Any]] = {"train_batch": sides.ours, "hand": sides.padded}
        if name != "equal":
            functions["hand_packed"] = sides.packed
        times = take_turns(functions, options.repeats)
        best = min(list(functions)[1:], key=lambda side: min(times[side]))
        figures[name] = {
            "rows": len(lengths),
            "tokens": sum(lengths),
            "microbatches": len(sides.plan),
            **{side: summary(found) for side, found in times.items()},
            "train_batch_over_hand": ratio(times["train_batch"], times[best]),
        }
        sides.engine.destroy()
    return figures


def measure_mfu(model_path: str, size: str, options: Any) -> dict[str, Any]:
    lengths = equal_lengths(options.tokens, options.length)
    flops = training_flops(model_config(size), lengths)
    figures = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        sides = Sides(model_path, lengths, cap=options.cap, bfloat16=name == "bfloat16")
        left, right = (torch.randn(options.matrix, options.matrix, dtype=dtype) for _ in range(2))
        product = torch.empty_like(left)

        def multiply(left: Tensor = left, right: Tensor = right, product: Tensor = product) -> None:
            for _ in range(8):
                torch.mm(left, right, out=product)

        times = take_turns(
            {"train_batch": sides.ours, "hand": sides.padded, "matrix": multiply}, options.repeats
        )
        peak = 8 * 2 * options.matrix**3 / min(times["matrix"])[0]
        figures[name] = {
            "matrix_gflops": round(peak / 1e6, 1),
            **{
                f"{side}_mfu": {
                    "of_minimum": round(flops / min(times[side])[0] / peak, 3),
                    "median": round(statistics.median(flops / t[0] for t in times[side]) / peak, 3),
                }
                for side in ("train_batch", "hand")
            },
        }
        sides.engine.destroy()
    return figures


def measure_packing(model_path: str, options: Any) -> dict[str, Any]:
    """Packed by us against padded by hand to the longest row of the whole batch."""
    figures = {}
    for name, lengths in (
        ("equal", equal_lengths(options.tokens, options.length)),
        ("log_normal", log_normal_lengths(options.tokens, options.cap, options.mean)),
    ):
        sides = Sides(model_path, lengths, cap=options.cap, bfloat16=options.bfloat16)
        width = max(lengths)
        filled = make_rows([width] * len(lengths), sides.engine.model.config.vocab_size)
        plan = cut_microbatches([width] * len(lengths), max_tokens=options.cap)
        times = take_turns(
            {
                "packed": sides.ours,
                "padded": lambda f=filled, p=plan, s=sides: s.hand.step_padded(f, p),
            },
            options.repeats,
        )
        ideal = width * len(lengths) / sum(lengths)
        faster = ratio(times["padded"], times["packed"])
        figures[name] = {
            "slots_over_tokens": round(ideal, 3),
            **{side: summary(found) for side, found in times.items()},
            "share_of_ideal": {key: round(value / ideal, 3) for key, value in faster.items()},
        }
        sides.engine.destroy()
    return figures


def measure_scaling(model_path: str, options: Any) -> dict[str, Any]:
    vocab_size = model_config(options.size).vocab_size
    engine = open_engine(model_path, cap=max(options.cap, options.tokens))
    shapes = {
        "length": [[n] * 4 for n in _halvings(options.tokens // 4)],
        "batch": [[options.length] * n for n in _halvings(options.tokens // options.length)],
    }
    figures = {}
    for name, found in shapes.items():
        batches = [make_batch(make_rows(lengths, vocab_size)) for lengths in found]
        times = take_turns(
            {
                str(i): lambda b=batch: engine.train_batch(b, sft_loss)
                for i, batch in enumerate(batches)
            },
            options.repeats,
        )
        tokens = [sum(lengths) for lengths in found]
        best = [min(times[str(i)])[0] for i in range(len(found))]
        figures[name] = {
            "tokens": tokens,
            "min_ms": [round(ms, 2) for ms in best],
            "slope": round(_slope(tokens, best), 3),
        }
    engine.destroy()
    return figures


def _halvings(largest: int) -> list[int]:
    sizes = [largest >> shift for shift in range(4)]
    return [size for size in reversed(sizes) if size >= 2]


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    return statistics.linear_regression([*map(math.log, x)], [*map(math.log, y)]).slope


# --- two ranks ----------------------------------------------------------------------------------


def measure_ranks(model_path: str, options: Any) -> dict[str, Any] | str:
    try:
        EngineRegistry.get_engine_cls("language_model", "fsdp", "cpu")
    except ConfigError:
        return "not available: this installation has no backend fsdp"
    rounds = 3
    sides = {"one": (1, False), "two": (2, False), "two_communicating_once": (2, True)}
    times: dict[str, list[Pair]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, (size, once) in sides.items():
            times[side] += _run_ranks(size, once, model_path, options)
    best = {side: min(found)[0] for side, found in times.items()}
    medians = {side: statistics.median(t[0] for t in found) for side, found in times.items()}
    return {
        **{side: summary(found) for side, found in times.items()},
        "efficiency": {
            side: {
                "of_minima": round(best["one"] / best[side] / 2, 3),
                "of_medians": round(medians["one"] / medians[side] / 2, 3),
            }
            for side in list(sides)[1:]
        },
    }


def _run_ranks(size: int, once: bool, model_path: str, options: Any) -> list[Pair]:
    """Step times of the first rank; every process has one thread."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--rank-of", model_path]
    for name in ("tokens", "length", "cap", "repeats", "size"):
        command += [f"--{name}", str(getattr(options, name))]
    if once:
        command.append("--once")
    processes = []
    for rank in range(size):
        facts = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank}
        facts |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        environment = os.environ | {name: str(value) for name, value in facts.items()}
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        )
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"a rank of {size} failed")
    return [(wall, cpu) for wall, cpu in json.loads(outputs[0].splitlines()[-1])]


def run_rank(options: Any) -> None:
    torch.set_num_threads(1)
    engine = open_engine(options.rank_of, cap=options.cap, backend="fsdp", once=options.once)
    lengths = equal_lengths(options.tokens, options.length)
    rows = make_rows(lengths, model_config(options.size).vocab_size)
    num_trained = sum(lengths) - len(lengths)
    rank, size = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    batch = make_batch(rows[rank::size], num_trained)
    engine.train_batch(batch, sft_loss)
    times = [timed(lambda: engine.train_batch(batch, sft_loss)) for _ in range(options.repeats)]
    print(json.dumps(times), flush=True)
    engine.destroy()


# --- peers --------------------------------------------------------------------------------------


def measure_peers(model_path: str, options: Any) -> dict[str, Any] | str:
    """A peer's step beside the loop written by hand, both in the peer's own environment."""
    figures: dict[str, Any] = {}
    for item in options.peer:
        peer = Peer.find(item, "step")
        spec = {
            "model_path": model_path,
            "lengths": equal_lengths(options.tokens, options.length),
            "vocab_size": model_config(options.size).vocab_size,
            "cap": options.cap,
            "repeats": options.repeats,
            "threads": options.threads,
            "bfloat16": options.bfloat16,
        }
        found = peer.run([json.dumps(spec)], threads=options.threads)
        times = {side: [tuple(pair) for pair in pairs] for side, pairs in found["times"].items()}
        hand = times.pop("hand")
        figures[peer.name] = {
            "version": found["version"],
            "hand": summary(hand),
            **{
                way: {**summary(pairs), "over_hand": ratio(pairs, hand)}
                for way, pairs in times.items()
            },
            "first_losses": found["losses"],
        }
    return figures or "none given (--peer trl=PYTHON)"


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--size", choices=SIZES, default="42m")
    arguments.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    arguments.add_argument("--tokens", type=int, default=4096, help="of one optimizer step")
    arguments.add_argument("--length", type=int, default=256, help="of rows of equal length")
    arguments.add_argument("--mean", type=int, default=MEAN_LENGTH, help="of log-normal lengths")
    arguments.add_argument("--cap", type=int, default=1024, help="tokens of a row, a micro-batch")
    arguments.add_argument("--matrix", type=int, default=2048, help="of the matrix peak")
    arguments.add_argument("--repeats", type=int, default=7)
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--bfloat16", action="store_true")
    arguments.add_argument("--peer", nargs="*", default=[], metavar="NAME=PYTHON")
    arguments.add_argument("--rank-of", help="a rank of the part 'ranks'; not to be typed")
    arguments.add_argument("--once", action="store_true", help="of such a rank")
    options = arguments.parse_args()
    if options.rank_of:
        run_rank(options)
        return
    torch.set_num_threads(options.threads)
    figures: dict[str, Any] = {"threads": options.threads, "size": options.size}
    measures: dict[str, Callable[[str], Any]] = {
        "step": lambda path: measure_step(path, options),
        "mfu": lambda path: measure_mfu(path, options.size, options),
        "packing": lambda path: measure_packing(path, options),
        "ranks": lambda path: measure_ranks(path, options),
        "scaling": lambda path: measure_scaling(path, options),
        "loop": lambda path: measure_loop(path, model_config(options.size).vocab_size, options),
        "peers": lambda path: measure_peers(path, options),
    }
    with tempfile.TemporaryDirectory() as folder:
        model_path = save_model(options.size, Path(folder))
        for part in options.parts:
            figures[part] = measures[part](model_path)
    report(figures, options.json)


if __name__ == "__main__":
    main()
