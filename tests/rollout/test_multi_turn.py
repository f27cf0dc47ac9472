"""Conversations: which ids are shown and trained, what ends them, who rewards them."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from tandem.errors import CapabilityError, ConfigError, RolloutError
from tandem.models.tiny import character_tokenizer
from tandem.rollout.environments import Environment, Step, load_environment
from tandem.rollout.environments.reasoning_gym import AttemptsEnvironment
from tandem.rollout.multi_turn import MultiTurnWorkflow
from tandem.rollout.scoring import Reward
from tandem.rollout.workflow import OverlongPromptError, load_workflow
from tandem.types import GenerationConfig, LLMRequest, LLMResponse, Prompt
from tests.data.chat import FAMILIES, FORGETFUL, with_template
from tests.rollout.doubles import GatedBackend, count, make_engine

TEXT = with_template("{{ messages }}")
EOS = 2


class Says(Environment):
    """Answers ``answers`` in turn with reward 1, 2, 3, ...; done after the last."""

    is_instant = True

    def __init__(self, answers: Sequence[Any] = ("x", "y"), first: Any = None) -> None:
        self.answers = list(answers)
        self.first = first
        self.actions: list[str] = []
        self.closed = 0

    def reset(self, seed: int, data: Mapping[str, Any]) -> Any:
        return self.first

    def step(self, action: str) -> Step:
        self.actions.append(action)
        made = len(self.actions)
        return self.answers[made - 1], float(made), made == len(self.answers)

    def close(self) -> None:
        self.closed += 1


class Factory:
    """Makes ``Says`` and remembers them; the first is made by the check of the configuration."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.made: list[Says] = []

    def __call__(self, **kwargs: Any) -> Says:
        self.made.append(Says(**self.settings | kwargs))
        return self.made[-1]


@pytest.fixture
def engines() -> Iterator[Any]:
    made = []

    def make(backend: GatedBackend | None = None, **rollout: Any) -> Any:
        made.append(make_engine(backend, **rollout))
        return made[-1]

    yield make
    for engine in made:
        engine.destroy()


def workflow(environment: Any = Says, tokenizer: Any = TEXT, **changes: Any) -> MultiTurnWorkflow:
    settings: dict[str, Any] = {
        "reward": lambda *_, **__: 10.0,
        "generation": GenerationConfig(max_new_tokens=20),
        "tokenizer": tokenizer,
        "environment": environment,
        "seed": 7,
    }
    return MultiTurnWorkflow(**(settings | changes))


def ids(text: str, tokenizer: Any = TEXT) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def saying(*turns: str, tokenizer: Any = TEXT) -> Callable[[LLMRequest], list[int]]:
    """Turn k of every trajectory is ``turns[k]``."""
    return lambda req: ids(turns[int(req.rid.rsplit(".", 1)[1])], tokenizer)


def text_of(row: Any, key: str, tokenizer: Any = TEXT) -> str:
    on = row["attention_mask"] & (row["loss_mask"] if key == "trained" else ~row["loss_mask"])
    found: str = tokenizer.decode(row["input_ids"][on])
    return found


PLAIN = {"prompt": "q", "prompt_ids": tuple(ids("q"))}
CHAT = [{"role": "user", "content": "q"}]


def test_observations_are_context_and_only_sampled_ids_are_trained(engines: Any) -> None:
    backend = GatedBackend(saying("a<eos>", "b<eos>"))
    batch = engines(backend).rollout_batch([PLAIN], workflow())
    assert [TEXT.decode(req.input_ids) for req in backend.requests] == ["q", "qa<eos>x"]
    (row,) = batch
    assert TEXT.decode(row["input_ids"]) == "qa<eos>xb<eos>"
    assert text_of(row, "trained") == "a<eos>b<eos>"
    assert row["versions"].tolist() == [-1, 0, 0, -1, 0, 0]
    assert row["logprobs"].tolist() == [0, -0.5, -0.5, 0, -0.5, -0.5]
    assert row["turn_ids"].tolist() == [0, 0, 0, 1, 1, 1]


def test_turn_rewards_lie_on_the_last_sampled_token_of_their_turn(engines: Any) -> None:
    backend = GatedBackend(saying("a<eos>", "b<eos>"))
    (row,) = engines(backend).rollout_batch([PLAIN], workflow(turn_discount=0.5))
    assert row["token_rewards"].tolist() == [0, 0, 1, 0, 0, 1]
    assert float(row["rewards"]) == 1 + 0.5 * 2


def test_a_final_reward_sees_the_last_turn_and_the_conversation(engines: Any) -> None:
    calls = []

    def reward(prompt: Any, completion: str, prompt_ids: Any, completion_ids: Any, **data: Any):
        calls.append((prompt, completion, completion_ids, data["turns"], data["answer"]))
        return 10.0

    backend = GatedBackend(saying("a<eos>", "b<eos>"))
    chosen = workflow(reward=reward, scored_by="both")
    (row,) = engines(backend).rollout_batch([{**PLAIN, "answer": "z"}], chosen)
    assert calls == [("q", "b", ids("b<eos>"), ["a", "b"], "z")]
    assert row["token_rewards"].tolist() == [0, 0, 1, 0, 0, 12]
    assert float(row["rewards"]) == 13
    (row,) = engines(GatedBackend(saying("a<eos>", "b<eos>"))).rollout_batch(
        [PLAIN], workflow(scored_by="reward")
    )
    assert float(row["rewards"]) == 10


def test_a_scorer_never_sees_what_the_environment_said(engines: Any) -> None:
    """Only the response mask says what the policy wrote (response mask [1, 1, 0, 0])."""
    backend = GatedBackend(saying("ab"))
    seen = workflow(
        Factory(answers=("obs", "never")),
        reward=lambda prompt, completion, p, c, **_: float("obs" in completion),
        scored_by="reward",
        max_turns=1,
    )
    (row,) = engines(backend).rollout_batch([PLAIN], seen)
    assert float(row["rewards"]) == 0.0
    assert row["loss_mask"].nonzero().flatten().tolist() == [1, 2]


class ToyTokenizer:
    """1 'he', 2 'llo', 3 'hello', 4 ' ok'; the longest piece wins."""

    pieces = ("", "he", "llo", "hello", " ok")
    eos_token_id = 0
    bos_token_id = unk_token_id = None
    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        found = []
        while text:
            best = max((i for i in range(1, 5) if text.startswith(self.pieces[i])), key=self._size)
            found.append(best)
            text = text[self._size(best) :]
        return {"input_ids": found}

    def _size(self, index: int) -> int:
        return len(self.pieces[index])

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(self.pieces[index] for index in token_ids)


def test_sampled_ids_are_copied_and_never_made_again_from_text(engines: Any) -> None:
    backend = GatedBackend(lambda req: [1, 2])
    data = {"prompt": " ok", "prompt_ids": (4,)}
    chosen = workflow(Factory(answers=(" ok", "")), tokenizer=ToyTokenizer())
    (row,) = engines(backend).rollout_batch([data], chosen)
    assert backend.requests[1].input_ids == (4, 1, 2, 4)
    assert row["input_ids"].tolist() == [4, 1, 2, 4, 1, 2]
    assert row["loss_mask"].tolist() == [False, True, True, False, True, True]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_next_prompt_of_a_chat_is_what_its_template_renders(engines: Any, family: str) -> None:
    tokenizer = with_template(FAMILIES[family])
    backend = GatedBackend(saying("first<eos>", "second<eos>", tokenizer=tokenizer))
    batch = engines(backend).rollout_batch([{"prompt": CHAT}], workflow(tokenizer=tokenizer))
    told = [*CHAT, {"role": "assistant", "content": "first"}, {"role": "user", "content": "x"}]
    expected = tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(backend.requests[1].input_ids) == expected
    (row,) = batch
    assert text_of(row, "trained", tokenizer) == "first<eos>second<eos>"
    assert row["input_ids"].tolist().count(1) == (family == "llama")


def test_an_end_that_was_not_sampled_is_context(engines: Any) -> None:
    tokenizer = with_template(FAMILIES["chatml"])
    backend = GatedBackend(saying("first", "b<eos>", tokenizer=tokenizer))
    (row,) = engines(backend).rollout_batch([{"prompt": CHAT}], workflow(tokenizer=tokenizer))
    assert tokenizer.decode(row["input_ids"]).count("first<eos>\n<eos>u\nx<eos>") == 1
    assert text_of(row, "trained", tokenizer) == "firstb<eos>"


def test_white_space_that_a_template_trims_does_not_split(engines: Any) -> None:
    tokenizer = with_template(FAMILIES["llama"])
    backend = GatedBackend(saying(" first  <eos>", "b<eos>", tokenizer=tokenizer))
    batch = engines(backend).rollout_batch([{"prompt": CHAT}], workflow(tokenizer=tokenizer))
    assert len(batch) == 1
    assert text_of(batch[0], "trained", tokenizer) == " first  <eos>b<eos>"


@pytest.mark.parametrize("template", [FORGETFUL, FAMILIES["qwen_thinking"]])
def test_a_template_that_rewrites_history_splits_the_trajectory(
    engines: Any, template: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = with_template(template)
    backend = GatedBackend(saying("why|yes<eos>", "so|no<eos>", tokenizer=tokenizer))
    records: list[Any] = []
    engine = engines(backend)
    chosen = workflow(tokenizer=tokenizer, group_size=2, min_group_size=2)
    batch = engine.rollout_batch([{"prompt": CHAT}], chosen.with_listener(records.append))
    assert batch["sample_ids"].tolist() == [0, 0, 1, 1]
    assert batch["rewards"].tolist() == [3, 3, 3, 3]
    assert [text_of(row, "trained", tokenizer) for row in batch[:2]] == [
        "why|yes<eos>",
        "so|no<eos>",
    ]
    seen = {tuple(req.input_ids) for req in backend.requests}
    for row in batch:
        start = int(row["loss_mask"].nonzero()[0])
        assert tuple(row["input_ids"][:start].tolist()) in seen
    assert "why" not in text_of(batch[1], "context", tokenizer)
    assert batch["turn_ids"].max() == 1
    assert "2 trajectories are split into 4 rows" in caplog.text


def test_tool_answers_do_not_make_a_thinking_template_rewrite(engines: Any) -> None:
    tokenizer = with_template(FAMILIES["qwen_thinking"])
    backend = GatedBackend(saying("why|yes<eos>", "b<eos>", tokenizer=tokenizer))
    said = [{"role": "tool", "content": "1"}]
    chosen = workflow(Factory(answers=(said, "")), tokenizer=tokenizer)
    batch = engines(backend).rollout_batch([{"prompt": CHAT}], chosen)
    assert len(batch) == 1


def test_the_environment_may_begin_and_the_system_message_stays(engines: Any) -> None:
    tokenizer = with_template(FAMILIES["chatml"])
    backend = GatedBackend(saying("a<eos>", "b<eos>", tokenizer=tokenizer))
    prompt = [{"role": "system", "content": "s"}, *CHAT]
    engines(backend).rollout_batch(
        [{"prompt": prompt}], workflow(Factory(first="begin"), tokenizer=tokenizer)
    )
    first = tokenizer.decode(backend.requests[0].input_ids)
    assert first == "<eos>s\ns<eos>\n<eos>u\nbegin<eos>\n<eos>a\n"


# --- ends -----------------------------------------------------------------------------------------


def test_the_turn_limit_truncates(engines: Any) -> None:
    backend = GatedBackend(saying(*["a<eos>"] * 3))
    factory = Factory(answers=("x", "y", "z"))
    (row,) = engines(backend).rollout_batch([PLAIN], workflow(factory, max_turns=2))
    assert bool(row["truncated"])
    assert TEXT.decode(row["input_ids"]) == "qa<eos>xa<eos>"
    (row,) = engines(GatedBackend(saying("a<eos>", "b<eos>"))).rollout_batch([PLAIN], workflow())
    assert not bool(row["truncated"])


def test_a_turn_cut_by_its_length_is_shown_to_the_environment_and_ends(engines: Any) -> None:
    factory = Factory()
    chosen = workflow(factory, generation=GenerationConfig(max_new_tokens=3))
    (row,) = engines(GatedBackend(saying("abcdef"))).rollout_batch([PLAIN], chosen)
    assert factory.made[1].actions == ["abc"]
    assert (bool(row["truncated"]), float(row["rewards"])) == (True, 1.0)
    assert TEXT.decode(row["input_ids"]) == "qabc"


def test_the_row_never_outgrows_max_tokens(engines: Any) -> None:
    """Row: q, 3 sampled, 4 observed: 8 tokens, no room for a ninth."""
    config = GenerationConfig(max_new_tokens=20, max_tokens=8)
    backend = GatedBackend(saying("ab<eos>", "c<eos>"))
    chosen = workflow(Factory(answers=("long", "")), generation=config)
    (row,) = engines(backend).rollout_batch([PLAIN], chosen)
    assert len(backend.requests) == 1
    assert TEXT.decode(row["input_ids"]) == "qab<eos>"
    assert bool(row["truncated"])


def test_an_aborted_turn_leaves_the_trajectory_unscored(engines: Any) -> None:
    class Aborting(GatedBackend):
        async def generate(self, req: LLMRequest) -> LLMResponse:
            response = await super().generate(req)
            if req.rid.endswith("1.1"):
                return LLMResponse(response.input_tokens, [], [], [], "abort")
            return response

    batch = engines(Aborting(saying("a<eos>", "b<eos>"))).rollout_batch(
        [PLAIN], workflow(group_size=2)
    )
    assert batch["rewards"].isnan().tolist() == [False, True]
    assert batch["loss_mask"].any(1).tolist() == [True, False]


def test_empty_turns_are_legal(engines: Any) -> None:
    (row,) = engines(GatedBackend(lambda req: [])).rollout_batch([PLAIN], workflow())
    assert not bool(row["loss_mask"].any())
    assert float(row["rewards"]) == 3.0


# --- environments ---------------------------------------------------------------------------------


def test_every_environment_is_closed_once_and_sees_plain_text(engines: Any) -> None:
    factory = Factory()
    backend = GatedBackend(saying("a<eos>", "b<eos>"))
    engines(backend).rollout_batch([PLAIN], workflow(factory, group_size=3))
    assert [item.closed for item in factory.made] == [1] * 4
    assert [item.actions for item in factory.made[1:]] == [["a", "b"]] * 3


def test_a_group_shares_its_environment_seed_and_turns_do_not_share_theirs(engines: Any) -> None:
    seeds = []

    class Seeded(Says):
        def reset(self, seed: int, data: Mapping[str, Any]) -> None:
            seeds.append(seed)

    backend = GatedBackend(saying("a<eos>", "b<eos>"))
    engine = engines(backend)
    prompts = [Prompt(0, i, PLAIN) for i in range(2)]
    engine.rollout_batch(prompts, workflow(Seeded, group_size=2))
    assert len(seeds) == 4
    assert len(set(seeds)) == 2
    drawn = [req.gconfig.seed for req in backend.requests]
    assert len(set(drawn)) == len(drawn) == 8


class Async(Says):
    is_instant = False

    async def reset(self, seed: int, data: Mapping[str, Any]) -> None:  # type: ignore[override]
        await asyncio.sleep(0)

    async def step(self, action: str) -> Step:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().step(action)


class Threaded(Says):
    is_instant = False


@pytest.mark.parametrize("kind", [Async, Threaded])
def test_environments_may_be_async_or_block(engines: Any, kind: type[Says]) -> None:
    backend = GatedBackend(saying("a<eos>", "b<eos>"))
    (row,) = engines(backend).rollout_batch([PLAIN], workflow(kind))
    assert float(row["rewards"]) == 3.0


class Broken(Says):
    def step(self, action: str) -> Any:
        if action == "a":
            return super().step(action)
        return {"raise": lambda: 1 / 0, "nan": lambda: ("x", float("nan"), True), "wrong": str}[
            action
        ]()


@pytest.mark.parametrize(
    ("action", "message"),
    [("raise", "ZeroDivisionError"), ("nan", "returned nan"), ("wrong", "observation, reward")],
)
def test_an_environment_that_fails_loses_the_sample(
    engines: Any, action: str, message: str
) -> None:
    def script(req: LLMRequest) -> list[int]:
        sample, turn = req.rid.split(".")[-2:]
        return ids(action + "<eos>" if (sample, turn) == ("1", "1") else "a<eos>")

    batch = engines(GatedBackend(script)).rollout_batch([PLAIN], workflow(Broken, group_size=2))
    assert batch["sample_ids"].tolist() == [0]
    engine = engines(GatedBackend(script))
    engine.submit(Prompt(0, 0, PLAIN), workflow(Broken, group_size=2, min_group_size=2))
    with pytest.raises(RolloutError, match=message):
        engine.wait(1)
    assert count(engine, "failed") == 1


def test_an_environment_that_hangs_ends_at_its_deadline(engines: Any) -> None:
    class Hangs(Async):
        async def step(self, action: str) -> Step:
            await asyncio.Event().wait()
            raise AssertionError

    engine = engines(GatedBackend(saying("a<eos>")))
    with pytest.raises(RolloutError, match="step_timeout_s"):
        engine.rollout_batch([PLAIN], workflow(Hangs, step_timeout_s=0.05))


def test_a_first_observation_obeys_the_overlong_policy(engines: Any) -> None:
    factory = Factory(first="abcdef")
    with pytest.raises(OverlongPromptError, match="6 tokens > 4"):
        engines().rollout_batch([PLAIN], workflow(factory, max_prompt_tokens=4))
    backend = GatedBackend(saying("a<eos>", "b<eos>"))
    chosen = workflow(factory, max_prompt_tokens=4, overlong_prompt="truncate_left")
    engines(backend).rollout_batch([PLAIN], chosen)
    assert TEXT.decode(backend.requests[0].input_ids) == "cdef"
    engine = engines(GatedBackend(saying("a<eos>", "b<eos>")))
    chosen = workflow(factory, max_prompt_tokens=4, overlong_prompt="filter")
    engine.submit(Prompt(0, 0, PLAIN), chosen)
    with pytest.raises(RolloutError, match="rejected 1"):
        engine.wait(1)


def test_settings_out_of_range_are_refused() -> None:
    for changes, name in (
        ({"max_turns": 0}, "max_turns"),
        ({"turn_discount": 2.0}, "turn_discount"),
        ({"scored_by": "me"}, "scored_by"),
        ({"environment": "nothing"}, "reasoning_gym, textarena"),
        ({"environment": int}, "made a int"),
        ({"environment_kwargs": {"wrong": 1}}, "wrong"),
    ):
        with pytest.raises(ConfigError, match=name):
            workflow(**changes)


def test_the_workflow_is_found_by_its_name() -> None:
    made = load_workflow(
        "multi_turn",
        reward=lambda *_: 1.0,
        generation=GenerationConfig(),
        tokenizer=TEXT,
        environment="reasoning_gym",
        environment_kwargs={"max_attempts": 3},
    )
    assert isinstance(made, MultiTurnWorkflow)


# --- adapters -------------------------------------------------------------------------------------


def attempt_data() -> dict[str, Any]:
    import reasoning_gym

    made = reasoning_gym.create_dataset("chain_sum", seed=1, size=20)
    entry = next(item for item in made if item["answer"].isdecimal())
    return {"task": "chain_sum", "entry": entry, "answer": entry["answer"]}


def test_reasoning_gym_answers_are_tried_again_for_less() -> None:
    data = attempt_data()
    environment = AttemptsEnvironment(max_attempts=3, discount=0.5, feedback="{attempts} left")
    environment.reset(0, data)
    assert environment.step("no") == ("2 left", 0.0, False)
    assert environment.step(data["answer"]) == ("", 0.5, True)
    environment.reset(0, data)
    assert environment.step(data["answer"]) == ("", 1.0, True)
    environment.reset(0, data)
    ends = [environment.step("no")[2] for _ in range(3)]
    assert ends == [False, False, True]


def test_a_reasoning_gym_episode_runs_whole(engines: Any) -> None:
    data = attempt_data()
    backend = GatedBackend(saying("no<eos>", f"{data['answer']}<eos>"))
    settings = {"max_attempts": 3, "discount": 0.5, "feedback": "again"}
    chosen = workflow("reasoning_gym", environment_kwargs=settings, max_turns=3)
    (row,) = engines(backend).rollout_batch([PLAIN | data], chosen)
    assert TEXT.decode(row["input_ids"]) == f"qno<eos>again{data['answer']}<eos>"
    assert text_of(row, "trained") == f"no<eos>{data['answer']}<eos>"
    assert float(row["rewards"]) == 0.5
    assert row["turn_ids"][row["loss_mask"]].unique().tolist() == [0, 1]


def test_a_group_reward_ranks_whole_conversations(engines: Any) -> None:
    seen: list[list[str]] = []

    def rank(prompt: Any, completions: Any, *_: Any, turns: Any, **__: Any) -> list[float]:
        seen.extend(turns)
        return [float(index) for index in range(len(completions))]

    backend = GatedBackend(saying("a<eos>", "b<eos>"))
    chosen = workflow(reward=Reward(rank, per="group"), scored_by="both", group_size=2)
    batch = engines(backend).rollout_batch([PLAIN], chosen)
    assert seen == [["a", "b"], ["a", "b"]]
    # The environment gives 1 and 2, the group reward 0 and 1 on the last turn.
    assert batch["rewards"].tolist() == [3.0, 4.0]
    for row, last in zip(batch, (2.0, 3.0), strict=True):
        earned = [row["token_rewards"][row["turn_ids"] == turn].sum() for turn in (0, 1)]
        assert [float(item) for item in earned] == [1.0, last]


def test_reasoning_gym_needs_its_columns(engines: Any) -> None:
    engine = engines(GatedBackend(saying("a<eos>")))
    with pytest.raises(RolloutError, match="missing column 'task'"):
        engine.rollout_batch([PLAIN], workflow("reasoning_gym"))


def test_textarena_that_is_not_installed_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(CapabilityError, match="pip install"):
        load_environment("textarena", {"game": "GuessTheNumber-v0"})


def test_a_game_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="game 'Nothing-v0'"):
        load_environment("textarena", {"game": "Nothing-v0"})


def test_textarena_plays_a_seeded_game_and_leaves_the_global_generator_alone() -> None:
    make = load_environment("textarena", {"game": "GuessTheNumber-v0"})
    before = random.getstate()
    games = [make() for _ in range(2)]
    assert games[0].reset(5, {}) == games[1].reset(5, {})
    secrets = []
    for game in games:
        for guess in range(1, 21):
            _, reward, done = game.step(f"[{guess}]")  # type: ignore[misc]
            if done:
                secrets.append((guess, reward))
                break
    assert secrets[0] == secrets[1]
    assert random.getstate() == before


def test_a_textarena_episode_runs_whole(engines: Any) -> None:
    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    backend = GatedBackend(
        lambda req: ids(f"[{1 + int(req.rid.rsplit('.', 1)[1])}]<eos>", tokenizer)
    )
    chosen = workflow(
        "textarena",
        tokenizer,
        environment_kwargs={"game": "GuessTheNumber-v0"},
        max_turns=30,
        generation=GenerationConfig(max_new_tokens=8),
    )
    batch = engines(backend).rollout_batch([PLAIN], chosen)
    assert bool(batch["rewards"].isfinite().all())
    assert int(batch["turn_ids"].max()) >= 1


def test_rows_of_conversations_make_a_batch_that_joins(engines: Any) -> None:
    backend = GatedBackend(saying("a<eos>", "b<eos>"))
    engine = engines(backend)
    for position in range(2):
        engine.submit(Prompt(0, position, PLAIN), workflow(group_size=2, min_group_size=2))
    batch = engine.wait(2)
    assert batch["sample_ids"].tolist() == [0, 1, 2, 3]
    assert torch.equal(batch["token_rewards"].sum(-1), batch["rewards"])
