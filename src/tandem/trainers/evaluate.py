"""Evaluation: the held-out prompts through the workflow of a run, scored and summed up.

Runs outside the staleness ledger, so that it can happen before, during and after training. What
the numbers mean is in ``algorithms/accuracy``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from tensordict import TensorDict

from tandem.algorithms.accuracy import Estimate, Sampled, avg_at_k, maj_at_k, pass_at_k
from tandem.config import EvalConfig, RolloutConfig
from tandem.data.batch import concat_batches
from tandem.data.packing import balanced_sizes
from tandem.data.prompts import PromptSource, open_prompts
from tandem.errors import DataError
from tandem.observe import Sample
from tandem.rollout import InferenceEngine, load_reward, load_workflow
from tandem.rollout.answers import load_answer_key
from tandem.rollout.group import OVERLONG_FILTERED
from tandem.store.records import EpisodeRecord
from tandem.types import EpisodeState, GenerationConfig, Prompt


@dataclass(frozen=True)
class Evaluation:
    """``estimates`` by name (``avg@k``, ``pass@j``, ``maj@k``); the rest are means and counts.

    ``num_failed`` counts samples without a score, which are wrong; ``num_filtered`` prompts that
    were too long and left out of everything.
    """

    estimates: Mapping[str, Estimate]
    accuracy: float
    reward_mean: float
    response_length: float
    num_prompts: int
    num_failed: int
    num_filtered: int
    samples: tuple[Sample, ...]

    def values(self) -> dict[str, float]:
        """Everything as numbers; the ends of an interval are ``_low`` and ``_high``."""
        found: dict[str, float] = {}
        for name, item in self.estimates.items():
            found[name] = item.value
            if item.interval is not None:
                found[f"{name}_low"], found[f"{name}_high"] = item.interval
        means = ("reward_mean", "response_length", "num_prompts", "num_failed", "num_filtered")
        return found | {name: getattr(self, name) for name in means}

    def as_metrics(self, name: str) -> dict[str, float]:
        return {f"eval/{name}/{key}": float(value) for key, value in self.values().items()}


class HeldOut:
    """The evaluation of a run: its prompts, how they are completed and how scored.

    Prompts go through ``rollout.workflow`` with the reward of ``config`` or else of ``rollout``;
    those of more than ``max_prompt_tokens`` are treated as ``rollout.overlong_prompt`` says.
    """

    def __init__(
        self,
        config: EvalConfig,
        rollout: RolloutConfig,
        tokenizer: Any,
        *,
        max_prompt_tokens: int,
        max_tokens: int,
        seed: int,
    ) -> None:
        if config.data is None:
            raise ValueError("HeldOut needs eval.data")
        self.config = config
        self.prompts: PromptSource = open_prompts(
            config.data,
            tokenizer,
            seed=seed,
            max_prompt_tokens=max_prompt_tokens,
            overlong=rollout.overlong_prompt,
        )
        reward = config.reward or rollout.reward
        self._answer_of = load_answer_key(config.answer, reward.name)
        self._seed = seed
        self._tokenizer = tokenizer
        self._overlong: set[int] = set()
        self._workflow = load_workflow(
            rollout.workflow,
            reward=load_reward(reward),
            generation=_bounded(config.decoding, max_tokens),
            group_size=config.samples,
            min_group_size=1,
            tokenizer=tokenizer,
            seed=seed + 1,
            max_prompt_tokens=max_prompt_tokens,
            overlong_prompt=rollout.overlong_prompt,
            **rollout.workflow_kwargs,
        ).with_listener(self._hear)

    def _hear(self, record: EpisodeRecord) -> None:
        if record.state is EpisodeState.REJECTED and OVERLONG_FILTERED in (record.reason or ""):
            self._overlong.add(record.episode_id)

    def evaluate(self, engine: InferenceEngine, *, num_samples_shown: int = 3) -> Evaluation:
        """Complete and score every prompt once, ``config.samples`` times each.

        A sample without a score (its reward failed, its episode was rejected) is wrong, gives no
        answer and counts in ``num_failed``. Rows of one trajectory count once.
        """
        prompts = self.prompts.all()
        remaining = iter(prompts)
        self._overlong.clear()
        # Even parts: a last one of few prompts, all of which fail, would be an error.
        num_parts = -(-len(prompts) // self.config.batch_size)
        batches = [
            engine.rollout_batch(list(islice(remaining, size)), self._workflow)
            for size in balanced_sizes(len(prompts), num_parts)
        ]
        made = _trajectories(concat_batches(batches))
        kept = [prompt for prompt in prompts if prompt.episode_id not in self._overlong]
        sampled = [self._sampled(made.get(prompt.episode_id, [])) for prompt in kept]
        if not sampled:
            raise DataError("eval.data: every prompt is too long (rollout.overlong_prompt=filter)")
        scored = [item for items in made.values() for item in items if item.is_scored]
        estimates = self._estimates(sampled)
        return Evaluation(
            estimates=estimates,
            accuracy=estimates[f"avg@{self.config.samples}"].value,
            reward_mean=sum(item.reward for item in scored) / max(len(scored), 1),
            response_length=sum(item.num_sampled for item in scored) / max(len(scored), 1),
            num_prompts=len(kept),
            num_failed=sum(len(item.right) for item in sampled) - len(scored),
            num_filtered=self.prompts.dropped + len(self._overlong),
            samples=self._shown(kept, made, num_samples_shown),
        )

    def _estimates(self, sampled: Sequence[Sampled]) -> dict[str, Estimate]:
        """``pass@j`` for the powers of two up to k, and k; ``maj@k`` where there is a vote."""
        k = self.config.samples
        found = {f"avg@{k}": avg_at_k(sampled, seed=self._seed)}
        for j in sorted({2**power for power in range(k.bit_length())} | {k}):
            found[f"pass@{j}"] = pass_at_k(sampled, j, seed=self._seed)
        if k > 1:
            found[f"maj@{k}"] = maj_at_k(sampled, seed=self._seed)
        return found

    def _sampled(self, made: Sequence[_Trajectory]) -> Sampled:
        right = [item.reward >= self.config.correct_at for item in made]
        answers = [self._answer(item) if item.is_scored else None for item in made]
        missing = max(0, self.config.samples - len(made))
        return Sampled([*right, *[False] * missing], [*answers, *[None] * missing])

    def _answer(self, item: _Trajectory) -> str | None:
        return self._answer_of(self._text(item.last_turn))

    def _text(self, ids: torch.Tensor) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _shown(
        self, prompts: Sequence[Prompt], made: Mapping[int, list[_Trajectory]], count: int
    ) -> tuple[Sample, ...]:
        """The first completion of the first prompts, for people to read."""
        shown: list[Sample] = []
        for prompt in prompts:
            scored = [item for item in made.get(prompt.episode_id, []) if item.is_scored]
            if scored and len(shown) < count:
                first = scored[0]
                shown.append(
                    Sample(
                        prompt=self._text(first.prompt),
                        completion=self._text(first.last_turn),
                        correct=first.reward >= self.config.correct_at,
                    )
                )
        return tuple(shown)


@dataclass(frozen=True, slots=True)
class _Trajectory:
    """One sample: its reward (NaN: none), its context and the ids of its last turn."""

    reward: float
    num_sampled: int
    prompt: torch.Tensor
    last_turn: torch.Tensor

    @property
    def is_scored(self) -> bool:
        return self.reward == self.reward


def _trajectories(rows: TensorDict) -> dict[int, list[_Trajectory]]:
    """The samples of each episode; the last row of a trajectory holds its last turn."""
    members: dict[int, dict[int, list[int]]] = {}
    pairs = zip(rows["episode_ids"].tolist(), rows["sample_ids"].tolist(), strict=True)
    for index, (episode_id, sample_id) in enumerate(pairs):
        members.setdefault(episode_id, {}).setdefault(sample_id, []).append(index)
    return {
        episode_id: [_trajectory(rows, indices) for indices in samples.values()]
        for episode_id, samples in members.items()
    }


def _trajectory(rows: TensorDict, indices: Sequence[int]) -> _Trajectory:
    last = indices[-1]
    ids, sampled = rows["input_ids"][last], rows["loss_mask"][last]
    turn = sampled
    if "turn_ids" in rows and bool(sampled.any()):
        turn_ids = rows["turn_ids"][last]
        turn = sampled & (turn_ids == turn_ids[sampled].max())
    first = int(turn.int().argmax())
    return _Trajectory(
        reward=float(rows["rewards"][last]),
        num_sampled=int(rows["loss_mask"][list(indices)].sum()),
        prompt=ids[:first],
        last_turn=ids[turn],
    )


def _bounded(generation: GenerationConfig, max_tokens: int) -> GenerationConfig:
    return generation.new(max_tokens=min(max_tokens, generation.max_tokens or max_tokens))
