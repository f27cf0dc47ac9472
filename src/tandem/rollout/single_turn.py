"""One prompt, G completions, one verifiable reward each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

from tandem.data.batch import collate
from tandem.data.prompts import Overlong, fit_prompt
from tandem.errors import ConfigError, DataError, RolloutError
from tandem.rollout.scoring import Reward, RewardError
from tandem.rollout.workflow import (
    Episode,
    OverlongPromptError,
    RolloutWorkflow,
    sample_seed,
)
from tandem.types import GenerationConfig, LLMRequest, LLMResponse

if TYPE_CHECKING:
    from tandem.rollout.engine import InferenceEngine


@dataclass
class SingleTurnWorkflow(RolloutWorkflow):
    """Samples ``group_size`` completions of a prompt at once and scores each when it is done.

    ``data`` needs ``prompt_ids``, or ``prompt`` (text, or chat messages) to make them from. The
    reward sees the text of the sampled ids without special tokens, and the ids. Only sampled
    tokens are in ``loss_mask``, the stop token included.

    A sample whose reward is None, or whose request was aborted, keeps its row with mask 0 and
    reward NaN. A reward that raises or is no finite number loses the sample. With fewer than
    ``min_group_size`` scored samples the episode is rejected, or failed when rewards failed;
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

    async def arun_episode(
        self, engine: InferenceEngine, data: Mapping[str, Any]
    ) -> TensorDict | None:
        episode = Episode.of(data)
        prompt_ids = self._prompt_ids(episode)
        if prompt_ids is None:
            return None
        samples = await _all_or_none(
            [self._sample(engine, episode, prompt_ids, i) for i in range(self.group_size)]
        )
        self._note(episode, prompt_ids, samples)
        kept = [sample for sample in samples if sample.error is None]
        num_scored = sum(sample.reward is not None for sample in kept)
        needed = self.min_group_size if episode.training else min(1, len(kept))
        if num_scored < needed or not kept:
            _reject_or_fail(episode, samples, num_scored, needed)
            return None
        return collate([self._row(episode, prompt_ids, sample) for sample in kept])

    def _prompt_ids(self, episode: Episode) -> tuple[int, ...] | None:
        ids = episode.get("prompt_ids")
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
            episode.notes["reason"] = (
                f"prompt of {len(ids)} > {self.max_prompt_tokens} tokens (overlong_prompt=filter)"
            )
        return fitted

    def _encode(self, episode: Episode) -> list[int]:
        prompt = episode.get("prompt")
        if isinstance(prompt, str):
            ids: list[int] = self.tokenizer.encode(prompt)
            return ids
        if isinstance(prompt, list):
            text = self.tokenizer.apply_chat_template(
                prompt, tokenize=False, add_generation_prompt=True
            )
            # The template wrote every special token; the tokenizer must not add another.
            chat_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
            return chat_ids
        raise DataError(
            f"episode {episode.episode_id}: needs prompt_ids, or prompt as text or messages; "
            f"received the columns {sorted(episode)}"
        )

    async def _sample(
        self, engine: InferenceEngine, episode: Episode, prompt_ids: tuple[int, ...], index: int
    ) -> _Sample:
        request = LLMRequest(
            rid=f"{episode.uid}.{index}",
            input_ids=prompt_ids,
            gconfig=self.generation.new(seed=sample_seed(self.seed, episode.episode_id, index)),
        )
        response = await engine.agenerate(request)
        text = self.tokenizer.decode(response.output_tokens, skip_special_tokens=True)
        if response.stop_reason == "abort":
            return _Sample(index, response, text, None, None)
        assert isinstance(self.reward, Reward)
        try:
            reward = await self.reward.score(
                prompt=episode.get("prompt"),
                completion=text,
                prompt_ids=prompt_ids,
                completion_ids=tuple(response.output_tokens),
                data=episode,
            )
        except RewardError as error:
            return _Sample(index, response, text, None, error)
        return _Sample(index, response, text, reward, None)

    def _note(self, episode: Episode, prompt_ids: tuple[int, ...], samples: list[_Sample]) -> None:
        prompt = episode.get("prompt")
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(list(prompt_ids))
        episode.notes["prompt"] = text
        episode.notes["completions"] = [sample.text for sample in samples]
        episode.notes["rewards"] = [sample.reward for sample in samples]

    def _row(
        self, episode: Episode, prompt_ids: tuple[int, ...], sample: _Sample
    ) -> dict[str, Any]:
        response = sample.response
        num_prompt, num_new = len(prompt_ids), len(response.output_tokens)
        is_scored = sample.reward is not None
        return {
            "input_ids": torch.tensor([*prompt_ids, *response.output_tokens]),
            "loss_mask": torch.tensor([False] * num_prompt + [is_scored] * num_new),
            "logprobs": torch.tensor([0.0] * num_prompt + response.output_logprobs),
            "versions": torch.tensor([-1] * num_prompt + response.output_versions),
            "rewards": torch.tensor(float("nan") if sample.reward is None else sample.reward),
            "temperature": self.generation.training_temperature,
            "truncated": response.stop_reason == "length",
            "group_ids": episode.episode_id,
            "sample_ids": sample.index,
            "episode_ids": episode.episode_id,
            "attempt": episode.attempt,
        }


@dataclass(frozen=True, slots=True)
class _Sample:
    index: int
    response: LLMResponse
    text: str
    reward: float | None
    error: RewardError | None


async def _all_or_none(samples: list[Any]) -> list[_Sample]:
    """All results in order; when one raises, the others are cancelled before it goes on."""
    tasks = [asyncio.ensure_future(sample) for sample in samples]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _reject_or_fail(episode: Episode, samples: list[_Sample], num_scored: int, needed: int) -> None:
    reason = f"{num_scored} of {len(samples)} samples were scored, at least {needed} are needed"
    errors = [sample.error for sample in samples if sample.error is not None]
    if errors:
        raise RolloutError(f"{reason}; the first reward that failed: {errors[0]}") from errors[0]
    episode.notes["reason"] = reason
