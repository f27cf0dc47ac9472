"""Log-probabilities with entropy: the chunked head beside full logits, memory and time.

    python benchmarks/head.py --threads 2 --json head.json
    python benchmarks/head.py --shapes 64x1000 --hidden 32 --repeats 5

Forward and backward of ``models/head`` and of the plain path, ``log_softmax`` of full fp32 logits
with autograd, on the same hidden states and weights. Extra peak is what is allocated above what was
live before, the gradients themselves included; ``without_gradients`` leaves those out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from machine import parser, report
from timing import ratio, summary, take_turns
from torch import Tensor

from tandem.models.head import token_logprobs
from tandem.train.forward import LOGIT_BUFFER

SHAPES = ("1024x151936", "8192x49152")
HIDDEN = 512


def peak_bytes(function: Callable[[], Any]) -> int:
    """Most that was allocated on the CPU at a time above what was live before."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiled:
        function()
    live = peak = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


class Case:
    """Hidden states in the compute dtype, fp32 masters of the weight, gradients of both sums."""

    def __init__(self, rows: int, vocab_size: int, hidden: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(rows, hidden, generator=generator).to(dtype).requires_grad_()
        weight = torch.randn(vocab_size, hidden, generator=generator) / hidden**0.5
        self.weight = weight.requires_grad_()
        self.targets = torch.randint(vocab_size, (rows,), generator=generator)
        self.temperature = torch.ones(rows)
        self.dtype = dtype

    def chunked(self) -> Tensor:
        logprobs, entropy = token_logprobs(
            self.hidden,
            self.weight,
            self.targets,
            self.temperature,
            with_entropy=True,
            chunk=max(16, LOGIT_BUFFER // self.weight.shape[0]),
        )
        assert entropy is not None
        return self._backward(logprobs, entropy)

    def full(self) -> Tensor:
        logits = (self.hidden @ self.weight.to(self.dtype).T).float()
        log_probs = (logits / self.temperature[:, None]).log_softmax(-1)
        logprobs = log_probs.gather(1, self.targets[:, None])[:, 0]
        entropy = -(log_probs.exp() * log_probs).sum(1)
        return self._backward(logprobs, entropy)

    def _backward(self, logprobs: Tensor, entropy: Tensor) -> Tensor:
        self.hidden.grad = self.weight.grad = None
        loss = -logprobs.mean() - 0.01 * entropy.mean()
        loss.backward()
        return loss.detach()

    def gradient_bytes(self) -> int:
        return self.hidden.nbytes + self.weight.nbytes


def measure(case: Case, repeats: int) -> dict[str, Any]:
    difference = float((case.chunked() - case.full()).abs())
    if difference > 5e-2:
        raise RuntimeError(f"the two heads differ by {difference}")
    peaks = {}
    for name, function in (("chunked", case.chunked), ("full", case.full)):
        case.hidden.grad = case.weight.grad = None
        peaks[name] = peak_bytes(function)
    times = take_turns({"chunked": case.chunked, "full": case.full}, repeats)
    gradients = case.gradient_bytes()
    return {
        "loss_difference": difference,
        "extra_peak_mib": {name: round(peak / 2**20, 1) for name, peak in peaks.items()},
        "peak_ratio": round(peaks["chunked"] / peaks["full"], 4),
        "peak_without_gradients_mib": round((peaks["chunked"] - gradients) / 2**20, 1),
        **{name: summary(found) for name, found in times.items()},
        "time_ratio": ratio(times["chunked"], times["full"]),
    }


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--shapes", nargs="+", default=list(SHAPES), help="TOKENSxVOCABULARY")
    arguments.add_argument("--hidden", type=int, default=HIDDEN)
    arguments.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    arguments.add_argument("--repeats", type=int, default=7)
    arguments.add_argument("--threads", type=int, default=2)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    figures: dict[str, Any] = {"threads": options.threads, "hidden": options.hidden}
    for shape in options.shapes:
        rows, vocab_size = map(int, shape.split("x"))
        for dtype in options.dtypes:
            case = Case(rows, vocab_size, options.hidden, getattr(torch, dtype))
            figures[f"{shape} {dtype}"] = measure(case, options.repeats)
    report(figures, options.json)


if __name__ == "__main__":
    main()
