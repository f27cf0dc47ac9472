"""Conversations of several turns with an environment that answers and rewards."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tandem.data.prompts import fit_prompt
from tandem.data.turns import Tools
from tandem.errors import CapabilityError, ConfigError, DataError
from tandem.rollout.environments import Environment, load_environment
from tandem.rollout.group import GroupWorkflow, Trajectory
from tandem.rollout.scoring import Completion, RewardError, checked_score
from tandem.rollout.threads import call_user
from tandem.rollout.transcript import (
    Observation,
    TokenRow,
    Transcript,
    as_messages,
    system_messages,
)
from tandem.rollout.workflow import Episode, OverlongPromptError, SampleError, sample_seed
from tandem.types import GenerationConfig, LLMRequest, LLMResponse, StopReason

if TYPE_CHECKING:
    from tandem.rollout.engine import InferenceEngine

_FATAL = (ConfigError, CapabilityError, OverlongPromptError)


@dataclass
class MultiTurnWorkflow(GroupWorkflow):
    """The model and an environment in turns, ``group_size`` times for each prompt.

    What the environment says is context and never trained on; what the model says is trained on
    with the very ids that were sampled. The environment sees a turn's text without special tokens.

    A trajectory ends when the environment says so. It is truncated when it ends otherwise: after
    ``max_turns``, at a turn that stopped at ``generation.max_new_tokens``, or when the row would
    outgrow ``generation.max_tokens``. A turn that was cut is still shown to the environment.

    ``scored_by`` says what makes the reward: the ``environment``'s turn rewards summed, turn k
    weighing ``turn_discount**k``; the ``reward`` function, which sees the last turn as the
    completion and the whole in the columns ``turns``, ``messages`` and ``stop_reasons``; or
    ``both`` added.
    """

    environment: str | Callable[..., Environment] = ""
    environment_kwargs: dict[str, Any] = field(default_factory=dict)
    max_turns: int = 4
    scored_by: Literal["environment", "reward", "both"] = "environment"
    turn_discount: float = 1.0
    step_timeout_s: float = 30.0
    tools: Tools | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_turns < 1:
            raise ConfigError(f"max_turns: got {self.max_turns}, allowed: an integer >= 1")
        if self.scored_by not in ("environment", "reward", "both"):
            raise ConfigError(
                f"scored_by: got {self.scored_by!r}, allowed: environment, reward, both"
            )
        if not 0 <= self.turn_discount <= 1:
            raise ConfigError(f"turn_discount: got {self.turn_discount}, allowed: in [0, 1]")
        self._make = load_environment(self.environment, self.environment_kwargs)

    @property
    def own_tools(self) -> Tools | None:
        return self.tools

    @property
    def is_scored_by_reward(self) -> bool:
        return self.scored_by != "environment"

    @property
    def has_turns(self) -> bool:
        return True

    async def sample(
        self, engine: InferenceEngine, episode: Episode, prompt_ids: tuple[int, ...], index: int
    ) -> Trajectory:
        environment = self._make()
        try:
            return await _Conversation(self, engine, episode, environment, index).run(prompt_ids)
        finally:
            environment.close()


class _Conversation:
    """One trajectory while it happens."""

    def __init__(
        self,
        workflow: MultiTurnWorkflow,
        engine: InferenceEngine,
        episode: Episode,
        environment: Environment,
        index: int,
    ) -> None:
        self._workflow = workflow
        self._engine = engine
        self._episode = episode
        self._environment = environment
        self._index = index
        self._where = f"episode {episode.episode_id}"
        self._earned = 0.0
        self._stop_reasons: list[StopReason] = []

    async def run(self, prompt_ids: tuple[int, ...]) -> Trajectory:
        transcript = await self._open(prompt_ids)
        if transcript is None:
            return self._unscored(prompt_ids)
        is_aborted = is_done = False
        for turn in range(self._workflow.max_turns):
            config = self._config(transcript, turn)
            if config is None:
                break
            seen = transcript.context
            response = await self._engine.agenerate(
                LLMRequest(f"{self._episode.uid}.{self._index}.{turn}", seen, config)
            )
            raw = transcript.add_turn(response)
            if response.stop_reason == "abort":
                is_aborted = True
                break
            observation, is_done = await self._step(transcript, response, raw, turn)
            self._stop_reasons.append(self._environment.stop_reason or response.stop_reason)
            if is_done or response.stop_reason == "length" or turn + 1 == self._workflow.max_turns:
                break
            try:
                transcript.add_observation(observation)
            except DataError as error:
                raise SampleError(f"{self._where}, turn {turn}: {error}") from error
        transcript.finish()
        return self._trajectory(transcript, prompt_ids, is_aborted, is_done)

    async def _open(self, prompt_ids: tuple[int, ...]) -> Transcript | None:
        """The conversation up to the first turn; None when its prompt is to be left out."""
        workflow, episode = self._workflow, self._episode
        # Without the sample's index: a group faces one and the same task.
        seed = sample_seed(workflow.seed, episode.episode_id, -1)
        first = await self._ask(lambda: self._environment.reset(seed, episode), "reset")
        prompt = episode.get("prompt", "")
        if first is not None:
            chat = isinstance(prompt, list)
            prompt = [*system_messages(prompt), *as_messages(first)] if chat else first
        transcript = Transcript(
            workflow.tokenizer,
            prompt,
            self._where,
            prompt_ids=prompt_ids if first is None else None,
            tools=workflow.tools_for(episode),
            stop_token_ids=workflow.generation.stop_token_ids,
        )
        if self._fits(transcript):
            return transcript
        workflow.note_overlong(episode, len(transcript.context))
        return None

    def _fits(self, transcript: Transcript) -> bool:
        workflow = self._workflow
        try:
            fitted = fit_prompt(
                transcript.context,
                workflow.max_prompt_tokens,
                workflow.overlong_prompt,
                f"{self._where}, first observation",
            )
        except DataError as error:
            raise OverlongPromptError(str(error)) from error
        if fitted is not None and len(fitted) < len(transcript.context):
            transcript.rows = [TokenRow.of(fitted)]
        return fitted is not None

    def _unscored(self, prompt_ids: tuple[int, ...]) -> Trajectory:
        asked = Completion(self._episode.get("prompt"), "", prompt_ids, ())
        return Trajectory(self._index, [TokenRow.of(prompt_ids)], "", asked, reward=None)

    def _config(self, transcript: Transcript, turn: int) -> GenerationConfig | None:
        """Options of this turn, None when there is no room for another token."""
        generation = self._workflow.generation
        limit = generation.max_tokens
        if limit is not None and len(transcript.context) + 1 > limit:
            return None
        seed = sample_seed(self._workflow.seed, self._episode.episode_id, self._index, turn)
        return generation.new(seed=seed)

    async def _step(
        self, transcript: Transcript, response: LLMResponse, raw: str, turn: int
    ) -> tuple[Observation, bool]:
        action = raw
        if not self._environment.keeps_special_tokens:
            action = self._workflow.tokenizer.decode(
                response.output_tokens, skip_special_tokens=True
            )
        answer = await self._ask(lambda: self._environment.step(action), "step")
        if not isinstance(answer, tuple) or len(answer) != 3:
            raise SampleError(
                f"{self._where}: the environment's step returned {answer!r:.80}, allowed: "
                "(observation, reward, done)"
            )
        observation, reward, done = answer
        try:
            score = checked_score(reward) or 0.0
        except RewardError as error:
            raise SampleError(f"{self._where}, turn {turn}: {error}") from error
        score *= self._workflow.turn_discount**turn
        if self._workflow.scored_by != "reward":
            transcript.rows[-1].reward_last(score)
            self._earned += score
        return observation, bool(done)

    async def _ask(self, function: Callable[[], Any], name: str) -> Any:
        bound = getattr(self._environment, name)
        is_async = inspect.iscoroutinefunction(bound) or self._environment.is_instant
        timeout_s = self._workflow.step_timeout_s
        try:
            return await call_user(function, is_async=is_async, timeout_s=timeout_s)
        except _FATAL:
            raise
        except TimeoutError as error:
            raise SampleError(
                f"{self._where}: the environment's {name} did not end within {timeout_s:g} s "
                "(step_timeout_s)"
            ) from error
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            raise SampleError(
                f"{self._where}: the environment's {name} raised {type(error).__name__}: {error}"
            ) from error

    def _trajectory(
        self, transcript: Transcript, prompt_ids: tuple[int, ...], is_aborted: bool, is_done: bool
    ) -> Trajectory:
        tokenizer, last = self._workflow.tokenizer, transcript.last
        sampled = () if last is None else tuple(last.output_tokens)
        said = transcript.turns[-1:]
        turns = list(transcript.turns)
        messages = [*transcript.messages, *({"role": "assistant", "content": t} for t in said)]
        cut = last is None or last.stop_reason == "length" or not is_done
        return Trajectory(
            self._index,
            transcript.rows,
            "\n---\n".join(turns),
            Completion(
                self._episode.get("prompt"),
                tokenizer.decode(list(sampled), skip_special_tokens=True),
                prompt_ids,
                sampled,
                {"turns": turns, "messages": messages, "stop_reasons": self._stop_reasons},
            ),
            reward=None if is_aborted else self._earned,
            is_truncated=cut and not is_aborted,
            num_splits=transcript.num_splits,
        )
