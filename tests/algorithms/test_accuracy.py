"""Accuracies and their intervals against enumeration and published values."""

from __future__ import annotations

import math
import random
from itertools import combinations

import pytest

from tandem.algorithms.accuracy import (
    Sampled,
    avg_at_k,
    estimate,
    maj_at_k,
    majority,
    pass_at_k,
    pass_probability,
    wilson_interval,
)
from tandem.errors import ConfigError, DataError


def of(*pairs: tuple[str | None, bool]) -> Sampled:
    return Sampled([right for _, right in pairs], [answer for answer, _ in pairs])


@pytest.mark.parametrize(
    ("n", "c", "k"), [(5, 2, 1), (5, 2, 3), (4, 0, 2), (4, 4, 4), (5, 3, 4), (7, 1, 7)]
)
def test_pass_probability_equals_enumeration(n: int, c: int, k: int) -> None:
    draws = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_probability(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 0), (4, 1, 5)])
def test_pass_of_more_than_there_are_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ConfigError, match="k: got"):
        pass_probability(n, c, k)


def test_pass_at_k_averages_over_prompts_with_uneven_samples() -> None:
    prompts = [of(("a", True), ("b", False)), of(("a", True), ("b", False), ("c", False))]
    # By hand: 1 of 2 draws of 1, and 1 of 3.
    assert pass_at_k(prompts, 1).value == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert pass_at_k(prompts, 2).value == pytest.approx((1 + 2 / 3) / 2)


def test_average_weighs_prompts_alike_not_samples() -> None:
    prompts = [of(("a", True)), of(("a", False), ("b", False), ("c", True))]
    assert avg_at_k(prompts).value == pytest.approx((1 + 1 / 3) / 2)


@pytest.mark.parametrize(
    ("prompt", "value"),
    [
        (of(("7", True), ("7", True), ("8", False)), 1.0),
        (of(("7", True), ("8", False), ("8", False)), 0.0),
        (of(("7", True), ("8", False)), 1 / 2),
        (of(("7", True), ("8", False), ("9", False)), 1 / 3),
        (of((None, False), (None, False), ("7", True)), 1.0),
        (of((None, False), (None, False)), 0.0),
        (of(("7", True), ("7", False), ("8", False)), 1 / 2),
    ],
)
def test_majority_counts_votes_and_splits_ties(prompt: Sampled, value: float) -> None:
    assert majority(prompt) == pytest.approx(value)


def test_majority_beats_the_average_where_the_right_answer_is_commonest() -> None:
    prompts = [of(("7", True), ("7", True), ("8", False))] * 3
    assert maj_at_k(prompts).value == 1.0
    assert avg_at_k(prompts).value == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    # Newcombe 1998, table I, method 3 (Wilson's score).
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_equals_published_values(
    right: int, count: int, low: float, high: float
) -> None:
    assert wilson_interval(right, count) == pytest.approx((low, high), abs=5e-5)


def test_all_right_is_not_certainty() -> None:
    found = estimate([1.0] * 40).interval
    assert found is not None
    assert found[0] == pytest.approx(40 / (40 + 1.96**2), abs=1e-4)
    assert found[1] == 1.0


def test_bootstrap_is_that_of_the_mean_over_prompts() -> None:
    values = [0.0, 0.25, 0.5, 0.5, 0.75, 1.0] * 20
    found = estimate(values, seed=3)
    mean = sum(values) / len(values)
    error = math.sqrt(sum((v - mean) ** 2 for v in values)) / len(values)
    assert found.interval is not None
    low, high = found.interval
    assert mean - low == pytest.approx(1.96 * error, rel=0.1)
    assert high - mean == pytest.approx(1.96 * error, rel=0.1)


def test_interval_is_a_function_of_the_seed_and_wider_for_prompts_that_differ() -> None:
    # The same 160 samples: of 40 prompts all alike, and of 40 prompts all or nothing but one.
    alike = [0.5] * 39 + [0.25]
    clustered = [float(index % 2) for index in range(39)] + [0.25]
    first, again = estimate(clustered, seed=1), estimate(clustered, seed=1)
    assert first == again
    assert first != estimate(clustered, seed=2)
    narrow = estimate(alike, seed=1).interval
    assert narrow is not None
    assert first.interval is not None
    assert first.interval[1] - first.interval[0] > 5 * (narrow[1] - narrow[0])


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    draw = random.Random(1)
    held = 0
    for seed in range(100):
        chances = [draw.random() for _ in range(50)]
        values = [sum(draw.random() < p for _ in range(4)) / 4 for p in chances]
        found = estimate(values, seed=seed).interval
        assert found is not None
        held += found[0] <= 0.5 <= found[1]
    assert 88 <= held <= 99


def test_one_prompt_with_some_right_says_nothing_of_others() -> None:
    assert estimate([0.5]).interval is None


def test_no_prompt_and_no_sample_are_refused() -> None:
    with pytest.raises(DataError, match="at least one prompt"):
        estimate([])
    with pytest.raises(DataError, match="at least one"):
        Sampled([], [])
