"""What an evaluation says about a model: avg@k, pass@k and maj@k, each with a 95 % interval.

Numbers in, numbers out: how prompts are completed and scored is ``trainers/evaluate``'s matter.
A prompt with its samples is the unit of all intervals, because samples of one prompt are alike.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tandem.errors import ConfigError, DataError

NUM_RESAMPLES = 2000
_Z = 1.959963984540054
"""The 97.5 % point of the normal distribution."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts with its 95 % interval, None where one prompt says nothing of others."""

    value: float
    interval: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Sampled:
    """The samples of one prompt: whether each is right, and the answer that it votes for.

    ``answers`` has None for a sample that gives no answer.
    """

    right: Sequence[bool]
    answers: Sequence[str | None]

    def __post_init__(self) -> None:
        if not self.right or len(self.right) != len(self.answers):
            raise DataError(
                f"samples of a prompt: got {len(self.right)} verdicts and {len(self.answers)} "
                "answers, allowed: one of each for every sample, and at least one"
            )


def avg_at_k(prompts: Sequence[Sampled], *, seed: int = 0) -> Estimate:
    """The fraction of right samples of a prompt, averaged over prompts."""
    return estimate([sum(item.right) / len(item.right) for item in prompts], seed=seed)


def pass_at_k(prompts: Sequence[Sampled], k: int, *, seed: int = 0) -> Estimate:
    """``pass_probability`` averaged over prompts, which may have different numbers of samples."""
    return estimate(
        [pass_probability(len(item.right), sum(item.right), k) for item in prompts], seed=seed
    )


def maj_at_k(prompts: Sequence[Sampled], *, seed: int = 0) -> Estimate:
    """``majority`` averaged over prompts; k is the number of samples (arXiv 2203.11171)."""
    return estimate([majority(item) for item in prompts], seed=seed)


def pass_probability(num_samples: int, num_correct: int, k: int) -> float:
    """``1 - C(n - c, k) / C(n, k)``: unbiased from ``n >= k`` samples (arXiv 2107.03374, eq. 1).

    It is the chance that k of the n samples, drawn without replacement, hold a right one.
    """
    if not 1 <= k <= num_samples:
        raise ConfigError(f"k: got {k}, allowed: 1 to the number of samples, {num_samples}")
    if not 0 <= num_correct <= num_samples:
        raise DataError(f"num_correct: got {num_correct}, allowed: 0 to {num_samples}")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def majority(prompt: Sampled) -> float:
    """How right the commonest answer is, from 0 to 1.

    A tie is drawn by lot, so it counts with the mean of the answers that tie. Samples without an
    answer do not vote; when none votes the prompt is wrong. Where equal answers were judged
    differently, an answer is as right as the fraction of its samples.
    """
    verdicts: dict[str, list[bool]] = defaultdict(list)
    for answer, right in zip(prompt.answers, prompt.right, strict=True):
        if answer is not None:
            verdicts[answer].append(right)
    if not verdicts:
        return 0.0
    most = max(map(len, verdicts.values()))
    winners = [sum(found) / most for found in verdicts.values() if len(found) == most]
    return sum(winners) / len(winners)


def estimate(values: Sequence[float], *, seed: int = 0) -> Estimate:
    """The mean of one value a prompt, each in [0, 1], with a 95 % interval.

    Wilson's where every value is 0 or 1, so that 40 of 40 is not certainty; else percentiles of
    ``NUM_RESAMPLES`` bootstrap means over prompts, a function of ``seed``.
    """
    if not values:
        raise DataError("an estimate needs at least one prompt, got none")
    values_P = np.asarray(values, dtype=np.float64)
    mean = float(values_P.mean())
    if np.isin(values_P, (0.0, 1.0)).all():
        return Estimate(mean, wilson_interval(round(values_P.sum()), len(values_P)))
    if len(values_P) == 1:
        return Estimate(mean, None)
    # One resample at a time: all of them at once would take resamples x prompts of memory.
    draw = np.random.default_rng(seed)
    means = [
        values_P[draw.integers(len(values_P), size=len(values_P))].mean()
        for _ in range(NUM_RESAMPLES)
    ]
    low, high = np.quantile(means, (0.025, 0.975))
    return Estimate(mean, (float(low), float(high)))


def wilson_interval(num_right: int, count: int) -> tuple[float, float]:
    """Wilson's score interval for ``num_right`` of ``count`` independent trials, at 95 %."""
    if not 0 <= num_right <= count or count < 1:
        raise DataError(f"num_right: got {num_right} of {count}, allowed: 0 to count, count >= 1")
    share, weight = num_right / count, _Z**2 / count
    centre = (share + weight / 2) / (1 + weight)
    half = _Z * math.sqrt(share * (1 - share) / count + weight / (4 * count)) / (1 + weight)
    return max(0.0, centre - half), min(1.0, centre + half)
