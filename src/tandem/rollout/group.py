"""What workflows with groups share: G trajectories of one prompt, scored, kept or given up.

How a single trajectory comes about is in ``single_turn``, ``multi_turn`` and ``agent``.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from tensordict import TensorDict

from tandem.data.batch import collate
from tandem.data.prompts import Overlong, fit_prompt
from tandem.data.text import tools_of
from tandem.data.turns import Tools
from tandem.errors import ConfigError, DataError, RolloutError
from tandem.rollout.scoring import Completion, Reward, Score
from tandem.rollout.transcript import TokenRow
from tandem.rollout.workflow import Episode, OverlongPromptError, RolloutWorkflow, SampleError
from tandem.types import GenerationConfig

if TYPE_CHECKING:
    from tandem.rollout.engine import InferenceEngine


log = logging.getLogger(__name__)

OVERLONG_FILTERED = "overlong_prompt=filter"
"""Stands in the reason of an episode that was rejected because of its prompt's length."""


@dataclass(slots=True, eq=False)
class Trajectory:
    """One sample of a group. All its rows have one ``sample_ids`` and one reward.

    ``completion`` is what a reward function is asked about, ``text`` what people read. ``reward``
    is what the trajectory earned on its way; None: nothing can be said about it. ``reward_parts``
    are those of the reward function's score, if it has several. ``num_splits`` counts how often a
    chat template rewrote what came before.
    """

    index: int
    rows: list[TokenRow]
    text: str
    completion: Completion
    reward: float | None = 0.0
    reward_parts: tuple[float, ...] | None = None
    error: SampleError | None = None
    is_truncated: bool = False
    num_splits: int = 0


@dataclass
class GroupWorkflow(RolloutWorkflow):
    """Runs ``group_size`` trajectories of a prompt at once and scores each.

    A sample whose reward is None, or whose request was aborted, keeps its rows with mask 0 and
    reward NaN. A sample that fails (a reward or an environment raises) is left out. With fewer than
    ``min_group_size`` scored samples the episode is rejected, or failed when samples failed;
    outside training (``rollout_batch``) one is enough.
    """

    reward: Reward | Callable[..., Any]
    generation: GenerationConfig
    tokenizer: Any
    group_size: int = 1
    min_group_size: int = 1
    seed: int = 0
    max_prompt_tokens: int | None = None
    overlong_prompt: Overlong = "error"

    def __post_init__(self) -> None:
        if not 1 <= self.min_group_size <= self.group_size:
            raise ConfigError(
                f"min_group_size {self.min_group_size}, group_size {self.group_size}: allowed is "
                "1 <= min_group_size <= group_size"
            )
        if self.generation.n_samples != 1:
            raise ConfigError(
                f"generation.n_samples: got {self.generation.n_samples}, allowed: 1; the number of "
                "samples is group_size"
            )
        if not isinstance(self.reward, Reward):
            self.reward = Reward(self.reward)
        self._has_told = False
        self._greedy: Self | None = None

    def with_greedy_baseline(self) -> Self:
        """A copy that makes one more trajectory of every training prompt, without chance.

        It is scored and not trained on; its reward is the key ``greedy_rewards`` of the others.
        """
        other, greedy = copy.copy(self), copy.copy(self)
        greedy.generation = self.generation.new(greedy=True)
        other._greedy = greedy
        return other

    @abstractmethod
    async def sample(
        self, engine: InferenceEngine, episode: Episode, prompt_ids: tuple[int, ...], index: int
    ) -> Trajectory:
        """One trajectory, not yet scored by the reward; ``SampleError`` loses it, others all."""

    @property
    def is_scored_by_reward(self) -> bool:
        """Whether the reward function is asked about every trajectory."""
        return True

    @property
    def has_turns(self) -> bool:
        """Whether the rows say which turn a token belongs to and what it earned."""
        return False

    @property
    def own_tools(self) -> Tools | None:
        """Schemas of tools that prompts are to show instead of those of the row."""
        return None

    def tools_for(self, episode: Episode) -> Tools | None:
        return self.own_tools or tools_of(episode, f"episode {episode.episode_id}")

    async def arun_episode(
        self, engine: InferenceEngine, data: Mapping[str, Any]
    ) -> TensorDict | None:
        episode = Episode.of(data)
        prompt_ids = self._prompt_ids(episode)
        if prompt_ids is None:
            return None
        greedy = self._greedy if episode.training else None
        samples = [self._scored(engine, episode, prompt_ids, i) for i in range(self.group_size)]
        if greedy is not None:
            samples.append(greedy._scored(engine, episode, prompt_ids, self.group_size))
        made = await all_or_none(samples)
        assert isinstance(self.reward, Reward)
        if self.is_scored_by_reward and self.reward.sees_group:
            await self._score_together(episode, made)
        baseline = None if greedy is None else made.pop()
        self._note(episode, prompt_ids, made)
        if baseline is not None and not _is_baseline(episode, baseline):
            return None
        kept = [item for item in made if item.error is None]
        num_scored = sum(item.reward is not None for item in kept)
        needed = self.min_group_size if episode.training else min(1, len(kept))
        if num_scored < needed or not kept:
            _reject_or_fail(episode, made, num_scored, needed)
            return None
        return collate([row for item in kept for row in self._rows(episode, item, baseline)])

    def _prompt_ids(self, episode: Episode) -> tuple[int, ...] | None:
        ids = None if self.own_tools else episode.get("prompt_ids")
        if ids is None:
            ids = self._encode(episode)
        try:
            fitted = fit_prompt(
                tuple(ids),
                self.max_prompt_tokens,
                self.overlong_prompt,
                f"episode {episode.episode_id}",
            )
        except DataError as error:
            raise OverlongPromptError(str(error)) from error
        if fitted is None:
            self.note_overlong(episode, len(ids))
        return fitted

    def note_overlong(self, episode: Episode, length: int) -> None:
        """Say why an episode is rejected whose prompt is filtered."""
        episode.notes["reason"] = (
            f"prompt of {length} > {self.max_prompt_tokens} tokens ({OVERLONG_FILTERED})"
        )

    def _encode(self, episode: Episode) -> list[int]:
        prompt = episode.get("prompt")
        if isinstance(prompt, str):
            ids: list[int] = self.tokenizer.encode(prompt)
            return ids
        if isinstance(prompt, list):
            text = self.tokenizer.apply_chat_template(
                prompt,
                tools=self.tools_for(episode),
                tokenize=False,
                add_generation_prompt=True,
            )
            # The template wrote every special token; the tokenizer must not add another.
            chat_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
            return chat_ids
        raise DataError(
            f"episode {episode.episode_id}: needs prompt_ids, or prompt as text or messages; "
            f"received the columns {sorted(episode)}"
        )

    async def _scored(
        self, engine: InferenceEngine, episode: Episode, prompt_ids: tuple[int, ...], index: int
    ) -> Trajectory:
        assert isinstance(self.reward, Reward)
        try:
            made = await self.sample(engine, episode, prompt_ids, index)
        except SampleError as error:
            nothing = Completion(episode.get("prompt"), "", prompt_ids, ())
            row = TokenRow.of(prompt_ids)
            return Trajectory(index, [row], "", nothing, reward=None, error=error)
        is_due = self.is_scored_by_reward and not self.reward.sees_group
        if is_due and made.reward is not None and made.error is None:
            try:
                _add_score(made, await self._score(made.completion, episode))
            except SampleError as error:
                made.reward, made.error = None, error
        return made

    async def _score(self, asked: Completion, episode: Episode) -> float | None:
        assert isinstance(self.reward, Reward)
        return await self.reward.score(
            prompt=asked.prompt,
            completion=asked.completion,
            prompt_ids=asked.prompt_ids,
            completion_ids=asked.completion_ids,
            data={**episode, **asked.columns} if asked.columns else episode,
        )

    async def _score_together(self, episode: Episode, made: Sequence[Trajectory]) -> None:
        assert isinstance(self.reward, Reward)
        due = [item for item in made if item.error is None and item.reward is not None]
        if not due:
            return
        completions = [item.completion for item in due]
        for item, score in zip(
            due, await self.reward.score_group(completions, episode), strict=True
        ):
            if isinstance(score, SampleError):
                item.reward, item.error = None, score
            else:
                _add_score(item, score)

    def _note(
        self, episode: Episode, prompt_ids: tuple[int, ...], made: Sequence[Trajectory]
    ) -> None:
        prompt = episode.get("prompt")
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(list(prompt_ids))
        episode.notes["prompt"] = text
        episode.notes["completions"] = [item.text for item in made]
        episode.notes["rewards"] = [item.reward for item in made]
        if (splits := sum(item.num_splits for item in made)) and not self._has_told:
            self._has_told = True
            log.warning(
                "episode %d: the chat template rewrites earlier turns as a conversation goes on; "
                "its %d trajectories are split into %d rows, and others will be too",
                episode.episode_id,
                len(made),
                len(made) + splits,
            )

    def _rows(
        self, episode: Episode, item: Trajectory, baseline: Trajectory | None
    ) -> list[dict[str, Any]]:
        is_scored = item.reward is not None
        rows: list[dict[str, Any]] = []
        extra = self._extra_keys(item, baseline)
        for position, row in enumerate(item.rows):
            rows.append(
                {
                    **row.tensors(is_trained=is_scored, has_turns=self.has_turns),
                    **extra,
                    "rewards": float("nan") if item.reward is None else float(item.reward),
                    "temperature": self.generation.training_temperature,
                    "truncated": item.is_truncated and position == len(item.rows) - 1,
                    "group_ids": episode.episode_id,
                    "sample_ids": item.index,
                    "episode_ids": episode.episode_id,
                    "attempt": episode.attempt,
                }
            )
        return rows

    def _extra_keys(self, item: Trajectory, baseline: Trajectory | None) -> dict[str, Any]:
        """What only some algorithms need: ``reward_parts [K]`` (NaN where a reward with parts gave
        none), ``greedy_rewards``."""
        assert isinstance(self.reward, Reward)
        extra: dict[str, Any] = {}
        if self.reward.weights and self.is_scored_by_reward:
            missing = (float("nan"),) * len(self.reward.weights)
            extra["reward_parts"] = torch.tensor(item.reward_parts or missing)
        if baseline is not None:
            extra["greedy_rewards"] = baseline.reward
        return extra


def _add_score(item: Trajectory, score: float | None) -> None:
    """Add the reward function's score to what was earned on the way; None is None for all."""
    if score is None or item.reward is None:
        item.reward = None
        return
    item.reward += score
    if isinstance(score, Score):
        item.reward_parts = score.parts
    item.rows[-1].reward_last(score)


async def all_or_none(samples: Sequence[Coroutine[Any, Any, Trajectory]]) -> list[Trajectory]:
    """All results in order; when one raises, the others are cancelled before it goes on."""
    tasks = [asyncio.ensure_future(sample) for sample in samples]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _is_baseline(episode: Episode, greedy: Trajectory) -> bool:
    """Whether the greedy trajectory has a reward; without one the episode is failed or rejected."""
    if greedy.error is not None:
        raise RolloutError(f"the greedy completion failed: {greedy.error}") from greedy.error
    if greedy.reward is None:
        episode.notes.setdefault("reason", "the greedy completion was not scored")
    return greedy.reward is not None


def _reject_or_fail(
    episode: Episode, made: Sequence[Trajectory], num_scored: int, needed: int
) -> None:
    reason = f"{num_scored} of {len(made)} samples were scored, at least {needed} are needed"
    errors = [item.error for item in made if item.error is not None]
    if errors:
        raise RolloutError(f"{reason}; the first sample that failed: {errors[0]}") from errors[0]
    episode.notes.setdefault("reason", reason)
