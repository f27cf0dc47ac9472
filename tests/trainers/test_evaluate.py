"""The evaluation of a run: what a sample is, what the model sees, what is left out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tandem.config import DataConfig, EvalConfig, RewardConfig, RolloutConfig
from tandem.data.batch import collate
from tandem.errors import ConfigError, DataError, RolloutError
from tandem.models.loading import load_tokenizer
from tandem.trainers.evaluate import HeldOut
from tandem.types import GenerationConfig, LLMRequest
from tests.rollout.doubles import GatedBackend, make_engine


class Engine:
    """Every prompt is answered rightly, but for the last, whose reward fails."""

    def __init__(self, num_prompts: int) -> None:
        self.num_prompts = num_prompts
        self.sizes: list[int] = []

    def rollout_batch(self, prompts: Any, workflow: Any) -> TensorDict:
        self.sizes.append(len(prompts))
        good = [p for p in prompts if p.position < self.num_prompts - 1]
        if not good:
            raise RolloutError("no episode ended well")
        return collate(
            [
                {
                    "input_ids": torch.tensor([5, 6]),
                    "loss_mask": torch.tensor([False, True]),
                    "rewards": 1.0,
                    "episode_ids": prompt.episode_id,
                    "sample_ids": index,
                }
                for index, prompt in enumerate(good)
            ]
        )


class Given:
    """Rows as the test gives them."""

    def __init__(self, *rows: tuple[int, int, float, str]) -> None:
        self.rows = rows

    def __call__(self, tokenizer: Any) -> Any:
        self.tokenizer = tokenizer
        return self

    def rollout_batch(self, prompts: Any, workflow: Any) -> TensorDict:
        made = []
        for position, sample, reward, text in self.rows:
            ids = self.tokenizer.encode("q" + text, add_special_tokens=False)
            mask = [False] + [reward == reward] * (len(ids) - 1)
            made.append(
                {
                    "input_ids": torch.tensor(ids),
                    "loss_mask": torch.tensor(mask),
                    "rewards": reward,
                    "episode_ids": prompts[position].episode_id,
                    "sample_ids": sample,
                }
            )
        return collate(made)


@pytest.fixture
def tokenizer(tiny_model_dir: Path) -> Any:
    return load_tokenizer(str(tiny_model_dir))


@pytest.fixture
def held_out(tokenizer: Any, tmp_path: Path) -> Callable[..., HeldOut]:
    def make(
        questions: list[str], *, rollout: dict[str, Any] | None = None, **changes: Any
    ) -> HeldOut:
        path = tmp_path / "rows.jsonl"
        path.write_text(
            "".join(json.dumps({"question": q, "answer": "1"}) + "\n" for q in questions)
        )
        settings = {"reward": {"name": "exact_match"}, **(rollout or {})}
        return HeldOut(
            EvalConfig(data=DataConfig(source="jsonl", path=str(path)), **changes),
            RolloutConfig.model_validate(settings),
            tokenizer,
            max_prompt_tokens=8,
            max_tokens=64,
            seed=0,
        )

    return make


@pytest.fixture
def engines() -> Iterator[Callable[..., Any]]:
    made = []

    def make(backend: GatedBackend) -> Any:
        made.append(make_engine(backend))
        return made[-1]

    yield make
    for engine in made:
        engine.destroy()


def test_a_failed_sample_counts_as_wrong_wherever_the_parts_end(held_out: Any) -> None:
    engine: Any = Engine(7)
    result = held_out([str(n) for n in range(7)], batch_size=3).evaluate(engine)
    assert engine.sizes == [3, 2, 2]
    assert result.accuracy == pytest.approx(6 / 7)
    assert result.num_failed == 1


def test_measures_of_several_samples(held_out: Any, tokenizer: Any) -> None:
    nan = float("nan")
    engine = Given(
        # Three of four right; "1" has the majority.
        (0, 0, 1.0, "1"), (0, 1, 1.0, "1"), (0, 2, 1.0, "1"), (0, 3, 0.0, "2"),
        # One right, one without a score, one missing; a tie of "1" and "3".
        (1, 4, 1.0, "1"), (1, 5, 0.0, "3"), (1, 6, nan, "1"),
    )(tokenizer)  # fmt: skip
    result = held_out(["a", "b"], samples=4).evaluate(engine)
    values = result.values()
    assert values["avg@4"] == result.accuracy == pytest.approx((3 / 4 + 1 / 4) / 2)
    assert values["pass@1"] == values["avg@4"]
    assert values["pass@2"] == pytest.approx((1 + (1 - 3 / 6)) / 2)
    assert values["pass@4"] == 1.0
    assert values["maj@4"] == pytest.approx((1 + 1 / 2) / 2)
    assert values["num_failed"] == 2
    assert values["reward_mean"] == pytest.approx(4 / 6)
    assert values["avg@4_low"] < values["avg@4"] < values["avg@4_high"]
    assert set(result.as_metrics("x")) == {f"eval/x/{name}" for name in values}


def test_rows_of_one_trajectory_are_one_sample_and_the_last_one_answers(
    held_out: Any, tokenizer: Any
) -> None:
    engine = Given(
        (0, 0, 1.0, "777"), (0, 0, 1.0, "1"),
        (0, 1, 0.0, "777"), (0, 1, 0.0, "2"),
        (0, 2, 1.0, "1"),
    )(tokenizer)  # fmt: skip
    result = held_out(["a"], samples=3).evaluate(engine)
    assert result.accuracy == pytest.approx(2 / 3)
    assert result.estimates["maj@3"].value == 1.0
    assert result.num_failed == 0
    assert result.response_length == pytest.approx((4 + 4 + 1) / 3)
    assert result.samples[0].completion == "1"


def test_a_threshold_says_what_is_right(held_out: Any, tokenizer: Any) -> None:
    engine = Given((0, 0, 0.6, "1"), (1, 1, 0.4, "1"))(tokenizer)
    assert held_out(["a", "b"]).evaluate(engine).accuracy == 0.0
    assert held_out(["a", "b"], correct_at=0.5).evaluate(engine).accuracy == 0.5


def test_one_sample_is_greedy_and_several_are_drawn(held_out: Any, engines: Any) -> None:
    for samples, greedy in ((1, True), (3, False)):
        backend = GatedBackend()
        held_out(["a"], samples=samples).evaluate(engines(backend))
        assert [req.gconfig.is_greedy for req in backend.requests] == [greedy] * samples
        assert len({req.gconfig.seed for req in backend.requests}) == samples


def test_several_samples_at_temperature_0_are_refused() -> None:
    cold = GenerationConfig(temperature=0.0)
    with pytest.raises(ValueError, match="raise the temperature"):
        EvalConfig(samples=2, generation=cold)
    assert EvalConfig(samples=1, generation=cold).decoding.is_greedy


@pytest.mark.parametrize("policy", ["filter", "error", "truncate_left"])
def test_overlong_prompts_are_treated_as_in_training(
    held_out: Any, engines: Any, policy: str
) -> None:
    questions = ["ab", "a" * 20, "cd"]
    if policy == "error":
        with pytest.raises(DataError, match="overlong_prompt"):
            held_out(questions, rollout={"overlong_prompt": policy})
        return
    backend = GatedBackend()
    made = held_out(questions, rollout={"overlong_prompt": policy})
    result = made.evaluate(engines(backend))
    lengths = [len(req.input_ids) for req in backend.requests]
    is_filtered = policy == "filter"
    assert len(lengths) == result.num_prompts == (2 if is_filtered else 3)
    assert max(lengths) <= 8
    assert result.num_filtered == (1 if is_filtered else 0)


ENVIRONMENT = """
from tandem.rollout.environments import Environment

class Env(Environment):
    is_instant = True
    def reset(self, seed, data):
        self.turns = 0
        return data["question"] + "=" * (30 if data["question"] == "long" else 1)
    def step(self, action):
        self.turns += 1
        return "?", float(self.turns == 2 and action == "1"), self.turns == 2
"""


def multi_turn(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    return {
        "workflow": "multi_turn",
        "workflow_kwargs": {"environment": f"{tmp_path / 'env.py'}:Env"},
        "overlong_prompt": "filter",
    }


def test_conversations_are_evaluated_as_conversations(
    held_out: Any, engines: Any, tokenizer: Any, tmp_path: Path
) -> None:
    end = [tokenizer.eos_token_id]

    def script(request: LLMRequest) -> list[int]:
        is_second = request.rid.endswith(".1")
        text = "1" if is_second and request.input_ids[0] == tokenizer.encode("a")[-1] else "2"
        return tokenizer.encode(text, add_special_tokens=False) + end

    backend = GatedBackend(script)
    made = held_out(["a", "b"], samples=2, rollout=multi_turn(tmp_path))
    result = made.evaluate(engines(backend))
    assert len(backend.requests) == 2 * 2 * 2
    assert result.accuracy == 0.5
    assert result.estimates["maj@2"].value == 0.5
    assert [sample.completion for sample in result.samples] == ["1", "2"]
    assert result.samples[0].prompt == "a=2?"


def test_a_first_observation_that_is_too_long_is_filtered_not_failed(
    held_out: Any, engines: Any, tmp_path: Path
) -> None:
    made = held_out(["a", "long"], rollout=multi_turn(tmp_path))
    result = made.evaluate(engines(GatedBackend()))
    assert (result.num_prompts, result.num_filtered, result.num_failed) == (1, 1, 0)


def test_unknown_answer_key_is_refused_before_anything_runs(held_out: Any) -> None:
    with pytest.raises(ConfigError, match=r"eval\.answer"):
        held_out(["a"], answer="nummer")


def test_reward_of_evaluation_replaces_that_of_training(held_out: Any, engines: Any) -> None:
    made = held_out(["a"], reward=RewardConfig(name="contains_answer"))
    backend = GatedBackend(lambda req: [*made._tokenizer.encode("so 1"), 2])
    assert made.evaluate(engines(backend)).accuracy == 1.0
