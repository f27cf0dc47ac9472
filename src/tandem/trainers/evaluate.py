"""Evaluation: completions for every prompt of a data source, scored; accuracy is a score of 1 or more.

Runs outside the staleness ledger, so that it can happen before, during and after training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tandem.config import EvalConfig, RewardConfig
from tandem.data import PromptSource, open_prompts
from tandem.observe import Sample
from tandem.rollout import EpisodeRecord, InferenceEngine, SingleTurnWorkflow, load_reward


@dataclass(frozen=True)
class Evaluation:
    """``accuracy`` averages over all completions, ``pass_at_k`` over prompts with one right of k."""

    accuracy: float
    pass_at_k: float
    reward_mean: float
    response_length: float
    num_prompts: int
    num_failed: int
    samples: tuple[Sample, ...]

    def as_metrics(self, name: str, k: int) -> dict[str, float]:
        prefix = f"eval/{name}"
        return {
            f"{prefix}/avg@{k}": self.accuracy,
            f"{prefix}/pass@{k}": self.pass_at_k,
            f"{prefix}/reward_mean": self.reward_mean,
            f"{prefix}/response_length": self.response_length,
            f"{prefix}/num_failed": float(self.num_failed),
        }


class HeldOut:
    """The evaluation of a run: its prompts, how they are completed and how scored."""

    def __init__(self, config: EvalConfig, reward: RewardConfig, tokenizer: Any, *, seed: int):
        if config.data is None:
            raise ValueError("HeldOut needs eval.data")
        self.config = config
        self.prompts: PromptSource = open_prompts(config.data, tokenizer, seed=seed)
        self._records: list[EpisodeRecord] = []
        self._workflow = SingleTurnWorkflow(
            load_reward(config.reward or reward),
            config.generation,
            config.samples,
            tokenizer,
            seed=seed + 1,
            min_group_size=1,
            on_episode=self._records.append,
        )

    def evaluate(self, engine: InferenceEngine, *, num_samples_shown: int = 3) -> Evaluation:
        """Complete and score every prompt once, ``config.samples`` times each.

        A sample whose reward failed counts as not correct and in ``num_failed``.
        """
        self._records.clear()
        prompts = self.prompts.all()
        rewards: list[float] = []
        lengths: list[float] = []
        solved = 0
        for start in range(0, len(prompts), self.config.batch_size):
            rows = engine.rollout_batch(
                prompts[start : start + self.config.batch_size], self._workflow
            )
            reward_B = rows["rewards"].double().nan_to_num(0.0)
            rewards += reward_B.tolist()
            lengths += rows["loss_mask"].sum(-1).tolist()
            solved += len(torch.unique(rows["episode_ids"][reward_B >= 1.0]))
        expected = len(prompts) * self.config.samples
        return Evaluation(
            accuracy=sum(reward >= 1.0 for reward in rewards) / expected,
            pass_at_k=solved / len(prompts),
            reward_mean=sum(rewards) / max(1, len(rewards)),
            response_length=sum(lengths) / max(1, len(lengths)),
            num_prompts=len(prompts),
            num_failed=expected - len(rewards),
            samples=self._shown(num_samples_shown),
        )

    def _shown(self, count: int) -> tuple[Sample, ...]:
        ordered = sorted(self._records, key=lambda record: record.episode_id)[:count]
        return tuple(
            Sample(r.prompt, r.completions[0], correct=(r.rewards[0] or 0.0) >= 1.0)
            for r in ordered
            if r.completions
        )
