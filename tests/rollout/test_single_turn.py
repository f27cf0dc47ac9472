"""The single-turn workflow: rows, masks, seeds, rewards and overlong prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tandem.errors import ConfigError, DataError, RolloutError
from tandem.rollout.single_turn import SingleTurnWorkflow
from tandem.rollout.workflow import OverlongPromptError, sample_seed
from tandem.types import GenerationConfig, LLMRequest, LLMResponse, Prompt
from tests.rollout.doubles import GatedBackend, LetterTokenizer, count, make_engine


@pytest.fixture
def engines() -> Iterator[Any]:
    made = []

    def make(backend: GatedBackend | None = None, **rollout: Any) -> Any:
        made.append(make_engine(backend, **rollout))
        return made[-1]

    yield make
    for engine in made:
        engine.destroy()


def workflow(reward: Callable[..., Any] = lambda *_, **__: 1.0, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "generation": GenerationConfig(max_new_tokens=4),
        "tokenizer": LetterTokenizer(),
        "group_size": 2,
        "seed": 7,
    }
    return SingleTurnWorkflow(reward, **(settings | changes))


def by_sample(*completions: list[int]) -> Callable[[LLMRequest], list[int]]:
    return lambda req: completions[int(req.rid.rsplit(".", 1)[1])]


PROMPT = Prompt(0, 3, {"prompt_ids": (1, 10, 11), "prompt": "ab", "answer": "c"})


def test_rows_have_every_key_and_train_exactly_the_sampled_tokens(engines: Any) -> None:
    backend = GatedBackend(by_sample([12, 13, 2], [12, 12, 12, 12]))
    engine = engines(backend, max_staleness=5)
    backend.commit(5)
    engine.submit(PROMPT, workflow(generation=GenerationConfig(max_new_tokens=4, temperature=0.7)))
    batch = engine.wait(1)
    assert batch["input_ids"].tolist() == [[1, 10, 11, 12, 13, 2, 0], [1, 10, 11, 12, 12, 12, 12]]
    assert batch["attention_mask"].sum(1).tolist() == [6, 7]
    assert batch["loss_mask"].tolist() == [
        [False] * 3 + [True] * 3 + [False],
        [False] * 3 + [True] * 4,
    ]
    assert batch["logprobs"].tolist() == [[0, 0, 0, -0.5, -0.5, -0.5, 0], [0] * 3 + [-0.5] * 4]
    assert batch["versions"].tolist() == [[-1, -1, -1, 5, 5, 5, -1], [-1] * 3 + [5] * 4]
    assert batch["truncated"].tolist() == [False, True]
    assert batch["temperature"].tolist() == pytest.approx([0.7, 0.7])
    assert batch["rewards"].tolist() == [1, 1]
    assert batch["group_ids"].tolist() == batch["episode_ids"].tolist() == [3, 3]
    assert batch["sample_ids"].tolist() == [0, 1]
    assert batch["attempt"].tolist() == [0, 0]


def test_a_forced_prefix_is_never_trained(engines: Any) -> None:
    """Prompt [1, 2], forced [9], sampled [7, 8]: two trained tokens, not three."""
    backend = GatedBackend(lambda req: [7, 8])
    batch = engines(backend).rollout_batch([{"prompt_ids": (1, 2, 9)}], workflow(group_size=1))
    assert batch["loss_mask"].tolist() == [[False, False, False, True, True]]
    assert int((batch["logprobs"] != 0).sum()) == 2


def test_the_reward_sees_text_without_special_tokens_ids_and_columns(engines: Any) -> None:
    calls = []

    def reward(
        prompt: Any, completion: str, prompt_ids: Any, completion_ids: Any, **data: Any
    ) -> float:
        calls.append((prompt, completion, prompt_ids, completion_ids, data))
        return 0.25

    engine = engines(GatedBackend(lambda req: [12, 13, 2]))
    batch = engine.rollout_batch([PROMPT], workflow(reward, group_size=1))
    assert calls == [("ab", "cd", [1, 10, 11], [12, 13, 2], {"answer": "c"})]
    assert batch["rewards"].tolist() == [0.25]


def test_samples_of_a_group_differ_and_repeat_for_any_split(engines: Any) -> None:
    def draw(req: LLMRequest) -> list[int]:
        generator = torch.Generator().manual_seed(int(req.gconfig.seed or 0))
        return torch.randint(0, 50, (8,), generator=generator).tolist()

    settings = {"group_size": 4, "generation": GenerationConfig(max_new_tokens=8)}
    prompts = [Prompt(0, i, {"prompt_ids": (5,)}) for i in range(4)]
    once = engines(GatedBackend(draw)).rollout_batch(prompts, workflow(**settings))
    rows = [tuple(row) for row in once["input_ids"].tolist()]
    assert len(set(rows)) == 16
    again = engines(GatedBackend(draw)).rollout_batch(prompts, workflow(**settings))
    assert torch.equal(once["input_ids"], again["input_ids"])
    split = [
        engines(GatedBackend(draw)).rollout_batch(half, workflow(**settings))["input_ids"]
        for half in (prompts[:1], prompts[1:])
    ]
    assert torch.equal(once["input_ids"], torch.cat(split))


def test_a_sample_seed_is_a_fixed_63_bit_function_of_run_prompt_and_index() -> None:
    # The first eight bytes of sha256("7/3/1"), without the lowest bit.
    assert sample_seed(7, 3, 1) == 0xE745B62FBE1CA334 >> 1
    assert sample_seed(7, 3, 1) < 1 << 63
    assert len({sample_seed(r, e, i) for r in (0, 1) for e in (0, 1) for i in (0, 1)}) == 8


def test_the_attempt_changes_request_ids_but_not_seeds(engines: Any) -> None:
    backend = GatedBackend()
    engine = engines(backend)
    for attempt in (0, 1):
        engine.executor.submit(PROMPT, workflow(), attempt=attempt)
        engine.wait(1)
        engine.backend.commit(engine.get_version() + 1)
        engine.set_version(engine.get_version())
    rids = [req.rid for req in backend.requests]
    seeds = [req.gconfig.seed for req in backend.requests]
    assert len(set(rids)) == 4
    assert seeds[:2] == seeds[2:]


def test_reward_none_keeps_the_row_with_mask_zero(engines: Any) -> None:
    scores = iter([1.0, None, 0.0, 0.0])
    batch = engines().rollout_batch([PROMPT], workflow(lambda *_, **__: next(scores), group_size=4))
    rewards = sorted(batch["rewards"].tolist(), key=lambda value: (math.isnan(value), value))
    assert rewards[:3] == [0.0, 0.0, 1.0]
    unscored = batch["rewards"].isnan()
    assert int(unscored.sum()) == 1
    assert not bool(batch["loss_mask"][unscored].any())
    assert bool(batch["loss_mask"][~unscored].any(1).all())


BAD_REWARDS = {
    "nan": lambda *_, **__: float("nan"),
    "inf": lambda *_, **__: float("inf"),
    "text": lambda *_, **__: "1.0",
    "list": lambda *_, **__: [1.0],
    "raises": lambda *_, **__: 1 / 0,
    "tensor of two": lambda *_, **__: torch.ones(2),
}


@pytest.mark.parametrize("name", BAD_REWARDS)
def test_a_reward_that_fails_loses_the_sample_and_is_never_zero(engines: Any, name: str) -> None:
    def reward(
        prompt: Any, completion: str, prompt_ids: Any, completion_ids: Any, **data: Any
    ) -> Any:
        return BAD_REWARDS[name]() if completion == "c" else 1.0

    engine = engines(GatedBackend(by_sample([10], [12], [11])))
    engine.submit(PROMPT, workflow(reward, group_size=3, min_group_size=2))
    batch = engine.wait(1)
    assert batch["rewards"].tolist() == [1, 1]
    assert batch["sample_ids"].tolist() == [0, 1]
    assert batch["input_ids"][:, 3].tolist() == [10, 11]


def test_a_group_below_its_minimum_fails_when_rewards_failed(engines: Any) -> None:
    engine = engines()
    engine.submit(PROMPT, workflow(lambda *_, **__: 1 / 0, min_group_size=2))
    with pytest.raises(RolloutError, match="ZeroDivisionError"):
        engine.wait(1)
    assert count(engine, "failed") == 1


def test_a_group_below_its_minimum_is_rejected_when_rewards_were_none(engines: Any) -> None:
    engine = engines()
    records: list[Any] = []
    chosen = workflow(lambda *_, **__: None, min_group_size=2).with_listener(records.append)
    engine.submit(PROMPT, chosen)
    with pytest.raises(RolloutError, match="rejected 1"):
        engine.wait(1)
    engine.destroy()
    assert records[0].reason == "0 of 2 samples were scored, at least 2 are needed"


def test_in_evaluation_one_scored_sample_is_enough(engines: Any) -> None:
    scores = iter([1.0, "bad"])
    batch = engines().rollout_batch(
        [PROMPT], workflow(lambda *_, **__: next(scores), min_group_size=2)
    )
    assert batch["rewards"].tolist() == [1.0]


def test_empty_completions_are_legal_rows_without_loss(engines: Any) -> None:
    engine = engines(GatedBackend(by_sample([5, 2], [])))
    engine.submit(PROMPT, workflow(min_group_size=2))
    batch = engine.wait(1)
    assert batch["loss_mask"].sum(1).tolist() == [2, 0]
    assert float(batch["loss_mask"].sum(1).float().mean()) == 1.0


def test_an_aborted_request_is_a_row_without_score_or_loss(engines: Any) -> None:
    class Aborting(GatedBackend):
        async def generate(self, req: LLMRequest) -> LLMResponse:
            response = await super().generate(req)
            if req.rid.endswith(".1"):
                return LLMResponse(response.input_tokens, [], [], [], "abort")
            return response

    batch = engines(Aborting()).rollout_batch([PROMPT], workflow())
    assert batch["rewards"].isnan().tolist() == [False, True]
    assert batch["loss_mask"].any(1).tolist() == [True, False]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("truncate_left", [3, 4, 5, 6]), ("truncate_right", [1, 2, 3, 4])],
)
def test_overlong_prompts_are_truncated_on_the_named_side(
    engines: Any, policy: str, expected: list[int]
) -> None:
    backend = GatedBackend()
    data = {"prompt_ids": (1, 2, 3, 4, 5, 6)}
    chosen = workflow(max_prompt_tokens=4, overlong_prompt=policy, group_size=1)
    engines(backend).rollout_batch([data], chosen)
    assert list(backend.requests[0].input_ids) == expected


def test_overlong_prompts_are_filtered_as_rejections(engines: Any) -> None:
    engine = engines()
    chosen = workflow(max_prompt_tokens=4, overlong_prompt="filter")
    engine.submit(Prompt(0, 0, {"prompt_ids": (1, 2, 3, 4, 5, 6)}), chosen)
    engine.submit(Prompt(0, 1, {"prompt_ids": (1, 2, 3, 4)}), chosen)
    assert set(engine.wait(1)["episode_ids"].tolist()) == {1}
    assert count(engine, "rejected") == 1


def test_an_overlong_prompt_stops_the_run_with_its_number_and_lengths(engines: Any) -> None:
    engine = engines()
    engine.submit(Prompt(0, 9, {"prompt_ids": (1, 2, 3, 4, 5, 6)}), workflow(max_prompt_tokens=4))
    with pytest.raises(OverlongPromptError, match=r"episode 9.* 6 tokens > 4"):
        engine.wait(1)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("ab", (1, 10, 11)), ([{"role": "user", "content": "ab"}], (10, 11))],
)
def test_prompts_without_ids_are_encoded_once(
    engines: Any, prompt: Any, expected: tuple[int, ...]
) -> None:
    backend = GatedBackend()
    engines(backend).rollout_batch([{"prompt": prompt}], workflow(group_size=1))
    assert backend.requests[0].input_ids == expected


def test_a_row_without_a_prompt_is_an_error_naming_its_columns(engines: Any) -> None:
    with pytest.raises(RolloutError, match=r"received the columns \['question'\]"):
        engines().rollout_batch([{"question": "?"}], workflow())


def test_the_record_has_prompt_completions_and_rewards_for_people(engines: Any) -> None:
    records: list[Any] = []
    engine = engines(GatedBackend(by_sample([12, 2], [13, 2])))
    engine.rollout_batch([PROMPT], workflow().with_listener(records.append))
    (record,) = records
    assert (record.prompt, record.completions, record.rewards) == ("ab", ("c", "d"), (1.0, 1.0))
    assert record.versions == ((0, 0), (0, 0))
    assert (record.state, record.training, record.episode_id) == ("ready", False, 3)


def test_a_request_that_fails_cancels_its_siblings_and_fails_the_episode(engines: Any) -> None:
    class Broken(GatedBackend):
        async def generate(self, req: LLMRequest) -> LLMResponse:
            if req.rid.endswith(".1"):
                raise DataError("prompt longer than the context")
            return await super().generate(req)

    backend = Broken()
    backend.allow(lambda req, made: False)
    with pytest.raises(RolloutError, match="longer than the context"):
        engines(backend).rollout_batch([PROMPT], workflow())
    assert backend.aborted == ["direct1.0.0"]


def test_greedy_rows_are_scored_at_temperature_one(engines: Any) -> None:
    greedy = GenerationConfig(greedy=True, temperature=0.0, max_new_tokens=4)
    batch = engines().rollout_batch([PROMPT], workflow(generation=greedy, group_size=1))
    assert batch["temperature"].tolist() == [1.0]


def test_contradicting_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="min_group_size"):
        workflow(group_size=2, min_group_size=3)
    with pytest.raises(ConfigError, match="n_samples"):
        workflow(generation=GenerationConfig(n_samples=2))
