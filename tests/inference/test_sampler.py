"""Sampled frequencies against exact probabilities, and the numbers that sampling draws on."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tandem.inference.embedded.sampler import History, Sampler, SamplingRow, uniforms
from tandem.types import GenerationConfig

LOGITS = [1.3, -0.4, 2.1, 0.0, 0.7, -2.0, 1.9, -0.1]
ROWS = 20_000
CHI_SQUARE_999 = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32}


def softmax(logits: list[float]) -> list[float]:
    weights = [math.exp(x) for x in logits]
    return [w / sum(weights) for w in weights]


def keep(probs: list[float], kept: set[int]) -> list[float]:
    total = sum(probs[i] for i in kept)
    return [p / total if i in kept else 0.0 for i, p in enumerate(probs)]


def by_probability(probs: list[float]) -> list[int]:
    return sorted(range(len(probs)), key=lambda i: -probs[i])


def nucleus(probs: list[float], top_p: float) -> list[float]:
    kept, total = set(), 0.0
    for i in by_probability(probs):
        if total >= top_p:
            break
        kept.add(i)
        total += probs[i]
    return keep(probs, kept)


PLAIN = softmax(LOGITS)
COLD = softmax([x / 0.6 for x in LOGITS])
TOP_3 = keep(PLAIN, set(by_probability(PLAIN)[:3]))
CASES = {
    "plain": ({}, PLAIN),
    "temperature": ({"temperature": 0.6}, COLD),
    "top_k": ({"top_k": 3}, TOP_3),
    "top_p": ({"top_p": 0.7}, nucleus(PLAIN, 0.7)),
    "min_p": (
        {"min_p": 0.3},
        keep(PLAIN, {i for i, p in enumerate(PLAIN) if p >= 0.3 * max(PLAIN)}),
    ),
    "top_k then top_p": ({"top_k": 3, "top_p": 0.6}, nucleus(TOP_3, 0.6)),
    "temperature then top_p": ({"temperature": 0.6, "top_p": 0.8}, nucleus(COLD, 0.8)),
    "logit_bias": (
        {"logit_bias": {5: 3.0}},
        softmax([x + 3 * (i == 5) for i, x in enumerate(LOGITS)]),
    ),
    "min_new_tokens": ({"min_new_tokens": 5}, keep(PLAIN, {0, 1, 3, 4, 5, 7})),
}


def draw(
    count: int, options: dict[str, object], *, tokens: list[int] | None = None, prompt: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """``count`` rows with seeds 0, 1, ... that share one history; stop tokens are 2 and 6."""
    tokens = tokens or [0]
    config = GenerationConfig(**options)
    rows = [SamplingRow(config, seed, (2, 6)) for seed in range(count)]
    history = History(
        np.tile(np.array(tokens), (count, 1)),
        np.full(count, prompt),
        np.full(count, len(tokens)),
    )
    logits = torch.tensor(LOGITS).repeat(count, 1)
    drawn = Sampler(rows, torch.device("cpu")).sample(logits, history)
    return drawn.ids, drawn.logprobs


@pytest.mark.parametrize("name", CASES)
def test_frequencies_and_logprobs_follow_the_exact_distribution(name: str) -> None:
    options, expected = CASES[name]
    ids, logprobs = draw(ROWS, options)
    counts = np.bincount(ids, minlength=len(LOGITS))
    allowed = [i for i, p in enumerate(expected) if p > 0]
    assert counts[[i for i in range(len(LOGITS)) if i not in allowed]].sum() == 0
    statistic = sum((counts[i] - ROWS * expected[i]) ** 2 / (ROWS * expected[i]) for i in allowed)
    assert statistic < CHI_SQUARE_999[len(allowed) - 1]
    np.testing.assert_allclose(logprobs, np.log(np.array(expected)[ids]), atol=1e-6)


def test_chi_square_would_notice_a_shift_of_one_token() -> None:
    ids, _ = draw(ROWS, {})
    shifted = np.bincount((ids + 1) % len(LOGITS), minlength=len(LOGITS))
    statistic = sum((c - ROWS * p) ** 2 / (ROWS * p) for c, p in zip(shifted, PLAIN, strict=True))
    assert statistic > 100 * CHI_SQUARE_999[7]


def test_temperature_logprob_has_the_handed_value() -> None:
    rows = [SamplingRow(GenerationConfig(temperature=0.6), seed, ()) for seed in range(400)]
    history = History(
        np.zeros((400, 1), dtype=np.int64),
        np.ones(400, dtype=np.int64),
        np.ones(400, dtype=np.int64),
    )
    drawn = Sampler(rows, torch.device("cpu")).sample(
        torch.tensor([0.0, 1.0, 2.0]).repeat(400, 1), history
    )
    first = drawn.logprobs[drawn.ids == 0]
    assert len(first) > 0
    np.testing.assert_allclose(first, -3.535906, atol=1e-6)


@pytest.mark.parametrize("options", [{"greedy": True}, {"temperature": 0.0}])
def test_greedy_takes_the_best_token_with_its_logprob_at_temperature_one(
    options: dict[str, object],
) -> None:
    ids, logprobs = draw(3, {**options, "top_k": 1, "min_p": 0.5})
    assert ids.tolist() == [2, 2, 2]
    np.testing.assert_allclose(logprobs, math.log(PLAIN[2]), atol=1e-6)


def test_greedy_and_filtered_rows_do_not_disturb_their_neighbours() -> None:
    configs = [
        GenerationConfig(),
        GenerationConfig(greedy=True),
        GenerationConfig(top_k=1),
        GenerationConfig(temperature=0.5, repetition_penalty=2.0),
    ]
    history = History(
        np.ones((4, 1), dtype=np.int64), np.ones(4, dtype=np.int64), np.ones(4, dtype=np.int64)
    )

    def sample(picked: list[int]) -> list[tuple[int, float]]:
        rows = [SamplingRow(configs[i], 100 + i, ()) for i in picked]
        part = History(
            history.tokens[picked], history.prompt_lengths[picked], history.lengths[picked]
        )
        drawn = Sampler(rows, torch.device("cpu")).sample(
            torch.tensor(LOGITS).repeat(len(picked), 1), part
        )
        return list(zip(drawn.ids.tolist(), drawn.logprobs.tolist(), strict=True))

    assert sample([0, 1, 2, 3]) == [sample([i])[0] for i in range(4)]


def test_penalties_have_their_closed_form() -> None:
    """Prompt 0 1, completion 4 4 5: repetition sees all of them, the others the completion."""
    options = {"repetition_penalty": 1.5, "presence_penalty": 0.25, "frequency_penalty": 0.5}
    ids, logprobs = draw(4000, options, tokens=[0, 1, 4, 4, 5], prompt=2)
    expected = softmax(
        [
            1.3 / 1.5,
            -0.4 * 1.5,
            2.1,
            0.0,
            0.7 / 1.5 - 0.25 - 2 * 0.5,
            -2.0 * 1.5 - 0.25 - 0.5,
            1.9,
            -0.1,
        ]
    )
    assert set(ids.tolist()) >= {0, 2, 3, 6, 7}
    np.testing.assert_allclose(logprobs, np.log(np.array(expected)[ids]), atol=1e-6)


def test_a_uniform_is_a_function_of_seed_and_position_only() -> None:
    seeds, positions = np.arange(6, dtype=np.uint64), np.array([9, 3, 3, 200, 0, 7])
    together = uniforms(seeds, positions)
    alone = [uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(6)]
    assert together.tolist() == alone


def test_a_uniform_is_two_rounds_of_splitmix64() -> None:
    mask = (1 << 64) - 1

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    for seed, position in ((0, 0), (7, 3), (mask, 1_000_000)):
        state = (mix((seed + golden) & mask) + golden * (position + 1)) & mask
        drawn = uniforms(np.array([seed], dtype=np.uint64), np.array([position]))[0]
        assert drawn == (mix(state) >> 11) / 2**53


@pytest.mark.parametrize("axis", ["seed", "position"])
def test_uniforms_are_uniform_and_uncorrelated(axis: str) -> None:
    count = np.arange(40_000)
    same = np.full(40_000, 3)
    seeds, positions = (count, same) if axis == "seed" else (same, count)
    drawn = uniforms(seeds.astype(np.uint64), positions)
    counts = np.bincount((drawn * 8).astype(int), minlength=8)
    assert ((counts - 5000) ** 2 / 5000).sum() < CHI_SQUARE_999[7]
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.02
    assert drawn.min() >= 0
    assert drawn.max() < 1


def test_the_last_token_can_be_drawn_and_nothing_beyond_it() -> None:
    rows = [SamplingRow(GenerationConfig(), seed, ()) for seed in range(5000)]
    ones = np.ones(5000, dtype=np.int64)
    drawn = Sampler(rows, torch.device("cpu")).sample(
        torch.tensor([float("-inf"), 0.0, 0.0, float("-inf")]).repeat(5000, 1),
        History(np.zeros((5000, 1), dtype=np.int64), ones, ones),
    )
    assert set(drawn.ids.tolist()) == {1, 2}


# --- a vocabulary of two blocks, of which only some tokens are candidates ---

DRAWS = 100_000
VOCABULARY = 300


@pytest.fixture(autouse=True)
def _few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.inference.embedded.filters.CANDIDATES", 64)


def chi_square_999(freedom: int) -> float:
    """Upper 0.1 % point, by Wilson and Hilferty."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 3.0902 * math.sqrt(spread)) ** 3


def wide_logits() -> np.ndarray:
    return np.random.default_rng(7).normal(size=VOCABULARY) * 1.7


def exact(options: dict[str, float]) -> np.ndarray:
    """Temperature, then top-k, top-p and min-p, in fp64 on a sorted row."""
    logits = wide_logits().astype(np.float32).astype(np.float64) / options.get("temperature", 1.0)
    order = np.argsort(-logits, kind="stable")
    probs = np.exp(logits - logits.max())
    kept = order[: int(options.get("top_k", 0)) or VOCABULARY]
    share = probs[kept] / probs[kept].sum()
    kept = kept[np.cumsum(share) - share < options.get("top_p", 1.0)]
    kept = kept[probs[kept] >= options.get("min_p", 0.0) * probs.max()]
    result = np.zeros(VOCABULARY)
    result[kept] = probs[kept] / probs[kept].sum()
    return result


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"top_p": 0.5},
        {"top_p": 0.97},
        {"top_k": 40},
        {"top_k": 200},
        {"min_p": 0.05},
        {"temperature": 1.3, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_a_hundred_thousand_draws_follow_the_exact_distribution(options: dict[str, float]) -> None:
    """Rare tokens are counted together, so that every cell expects at least ten draws."""
    expected = exact(options)
    config, logits = GenerationConfig(**options), torch.tensor(wide_logits(), dtype=torch.float32)
    counts, per_batch = np.zeros(VOCABULARY), 5000
    ones = np.ones(per_batch, dtype=np.int64)
    for first in range(0, DRAWS, per_batch):
        rows = [SamplingRow(config, seed, ()) for seed in range(first, first + per_batch)]
        history = History(np.zeros((per_batch, 1), dtype=np.int64), ones, ones)
        drawn = Sampler(rows, torch.device("cpu")).sample(logits.repeat(per_batch, 1), history)
        counts += np.bincount(drawn.ids, minlength=VOCABULARY)
        np.testing.assert_allclose(drawn.logprobs, np.log(expected[drawn.ids]), atol=3e-6)
    assert counts[expected == 0].sum() == 0
    common = expected * DRAWS >= 10
    cells = [*zip(counts[common], expected[common] * DRAWS, strict=True)]
    rest = expected[~common].sum() * DRAWS
    if rest > 0:
        cells.append((counts[~common].sum(), rest))
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    assert statistic < chi_square_999(len(cells) - 1)


def test_draws_at_block_borders_follow_the_distribution() -> None:
    """All weight on tokens 255, 256 and the last one, which lies in a block that is not full."""
    logits = torch.full((900,), float("-inf"))
    logits[[255, 256, 899]] = torch.tensor([0.0, math.log(2.0), math.log(3.0)])
    rows = [SamplingRow(GenerationConfig(), seed, ()) for seed in range(6000)]
    ones = np.ones(6000, dtype=np.int64)
    drawn = Sampler(rows, torch.device("cpu")).sample(
        logits.repeat(6000, 1), History(np.zeros((6000, 1), dtype=np.int64), ones, ones)
    )
    counts = np.bincount(drawn.ids, minlength=900)
    assert counts.sum() == counts[[255, 256, 899]].sum()
    expected = np.array([1000, 2000, 3000])
    statistic = ((counts[[255, 256, 899]] - expected) ** 2 / expected).sum()
    assert statistic < CHI_SQUARE_999[2]


def test_what_is_kept_of_a_row_does_not_depend_on_its_neighbours() -> None:
    """One neighbour needs a full sort, one is greedy, one has other filters; ties are frequent."""
    logits = torch.tensor(wide_logits(), dtype=torch.bfloat16).float()
    configs = [
        GenerationConfig(top_k=50),
        GenerationConfig(top_p=0.999, temperature=2.0),
        GenerationConfig(greedy=True),
        GenerationConfig(top_p=0.4, min_p=0.01),
        GenerationConfig(top_k=200, top_p=0.9),
    ]

    def sample(picked: list[int]) -> list[tuple[int, float]]:
        rows = [SamplingRow(configs[i], 77 + i, ()) for i in picked]
        ones = np.ones(len(picked), dtype=np.int64)
        history = History(np.zeros((len(picked), 1), dtype=np.int64), ones, ones)
        drawn = Sampler(rows, torch.device("cpu")).sample(logits.repeat(len(picked), 1), history)
        return list(zip(drawn.ids.tolist(), drawn.logprobs.tolist(), strict=True))

    assert sample([0, 1, 2, 3, 4]) == [sample([i])[0] for i in range(5)]


def test_raw_logprobs_and_alternatives_have_their_closed_form() -> None:
    config = GenerationConfig(temperature=0.5, top_k=3, logit_bias={5: 3.0})
    rows = [
        SamplingRow(GenerationConfig(), 0, ()),
        SamplingRow(config, 1, (), raw=True, top=5),
        SamplingRow(GenerationConfig(greedy=True), 2, (), raw=True),
    ]
    ones = np.ones(3, dtype=np.int64)
    drawn = Sampler(rows, torch.device("cpu")).sample(
        torch.tensor(LOGITS).repeat(3, 1), History(np.zeros((3, 1), dtype=np.int64), ones, ones)
    )
    assert math.isnan(drawn.raw_logprobs[0])
    np.testing.assert_allclose(
        drawn.raw_logprobs[1:], [math.log(PLAIN[i]) for i in drawn.ids[1:]], atol=1e-6
    )
    biased = softmax([(x + 3 * (i == 5)) / 0.5 for i, x in enumerate(LOGITS)])
    kept = keep(biased, set(by_probability(biased)[:3]))
    assert list(drawn.top) == [1]
    assert [token for token, _ in drawn.top[1]] == by_probability(kept)[:3]
    for token, logprob in drawn.top[1]:
        assert logprob == pytest.approx(math.log(kept[token]), abs=1e-6)
