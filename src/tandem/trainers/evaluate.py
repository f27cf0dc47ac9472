"""Evaluation: completions for every held-out prompt, scored; accuracy is a score of 1 or more.

Runs outside the staleness ledger, so that it can happen before, during and after training.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from tensordict import TensorDict

from tandem.config import EvalConfig, RewardConfig
from tandem.data.batch import concat_batches
from tandem.data.packing import balanced_sizes
from tandem.data.prompts import PromptSource, open_prompts
from tandem.observe import Sample
from tandem.rollout import InferenceEngine, SingleTurnWorkflow, load_reward


@dataclass(frozen=True)
class Evaluation:
    """``accuracy`` averages over completions, ``pass_at_k`` over prompts with one right of k."""

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

    def __init__(
        self,
        config: EvalConfig,
        reward: RewardConfig,
        tokenizer: Any,
        *,
        max_prompt_tokens: int,
        seed: int,
    ) -> None:
        if config.data is None:
            raise ValueError("HeldOut needs eval.data")
        self.config = config
        self.prompts: PromptSource = open_prompts(
            config.data, tokenizer, seed=seed, max_prompt_tokens=max_prompt_tokens
        )
        self._tokenizer = tokenizer
        self._workflow = SingleTurnWorkflow(
            reward=load_reward(config.reward or reward),
            generation=config.generation,
            tokenizer=tokenizer,
            group_size=config.samples,
            seed=seed + 1,
        )

    def evaluate(self, engine: InferenceEngine, *, num_samples_shown: int = 3) -> Evaluation:
        """Complete and score every prompt once, ``config.samples`` times each.

        A sample whose reward failed counts as not correct and in ``num_failed``.
        """
        prompts = self.prompts.all()
        remaining = iter(prompts)
        # Even parts: a last one of few prompts, all of which fail, would be an error.
        num_parts = -(-len(prompts) // self.config.batch_size)
        batches = [
            engine.rollout_batch(list(islice(remaining, size)), self._workflow)
            for size in balanced_sizes(len(prompts), num_parts)
        ]
        rows = concat_batches(batches)
        reward_B = rows["rewards"].double().nan_to_num(0.0)
        right_B = reward_B >= 1.0
        solved = len(torch.unique(rows["episode_ids"][right_B]))
        expected = len(prompts) * self.config.samples
        return Evaluation(
            accuracy=int(right_B.sum()) / expected,
            pass_at_k=solved / len(prompts),
            reward_mean=float(reward_B.mean()),
            response_length=float(rows["loss_mask"].sum(-1).double().mean()),
            num_prompts=len(prompts),
            num_failed=expected - len(reward_B),
            samples=self._shown(rows, num_samples_shown),
        )

    def _shown(self, rows: TensorDict, count: int) -> tuple[Sample, ...]:
        """The first completion of the first prompts, for people to read."""
        shown: dict[int, Sample] = {}
        for row in rows:
            episode_id = int(row["episode_ids"])
            if len(shown) == count or episode_id in shown:
                continue
            ids, sampled = row["input_ids"], row["loss_mask"]
            prompt_ids = ids[row["attention_mask"] & ~sampled]
            shown[episode_id] = Sample(
                prompt=self._tokenizer.decode(prompt_ids, skip_special_tokens=True),
                completion=self._tokenizer.decode(ids[sampled], skip_special_tokens=True),
                correct=bool(row["rewards"] >= 1.0),
            )
        return tuple(shown.values())
