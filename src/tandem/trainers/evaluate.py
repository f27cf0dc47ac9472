"""Evaluation: completions for every prompt of a data source, scored; accuracy is a score of 1 or more.

Runs outside the staleness ledger, so that it can happen before, during and after training.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandem.config import EvalConfig
from tandem.data import PromptSource
from tandem.rollout import EpisodeRecord, InferenceEngine, SingleTurnWorkflow


@dataclass(frozen=True)
class Sample:
    """One completion, for people to read."""

    prompt: str
    completion: str
    reward: float | None


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


def evaluate(
    engine: InferenceEngine,
    prompts: PromptSource,
    workflow: SingleTurnWorkflow,
    config: EvalConfig,
    *,
    num_samples_shown: int = 3,
) -> Evaluation:
    """Complete and score every prompt of ``prompts`` once, ``config.samples`` times each.

    A sample whose reward failed counts as not correct and in ``num_failed``.
    """
    records: list[EpisodeRecord] = []
    rewards: list[float] = []
    lengths: list[float] = []
    solved = 0
    scored_workflow = workflow.with_listener(records.append)
    for start in range(0, len(prompts), config.batch_size):
        stop = min(start + config.batch_size, len(prompts))
        chunk = [prompts.prompt(0, position) for position in range(start, stop)]
        rows = engine.rollout_batch(chunk, scored_workflow)
        reward_B = rows["rewards"].double().nan_to_num(0.0)
        rewards += reward_B.tolist()
        lengths += rows["loss_mask"].sum(-1).tolist()
        right_B = reward_B >= 1.0
        solved += len(torch.unique(rows["episode_ids"][right_B]))
    expected = len(prompts) * config.samples
    right = sum(reward >= 1.0 for reward in rewards)
    return Evaluation(
        accuracy=right / expected,
        pass_at_k=solved / len(prompts),
        reward_mean=sum(rewards) / max(1, len(rewards)),
        response_length=sum(lengths) / max(1, len(lengths)),
        num_prompts=len(prompts),
        num_failed=expected - len(rewards),
        samples=_shown(records, num_samples_shown),
    )


def _shown(records: list[EpisodeRecord], count: int) -> tuple[Sample, ...]:
    ordered = sorted(records, key=lambda record: record.episode_id)[:count]
    return tuple(
        Sample(record.prompt, record.completions[0], record.rewards[0])
        for record in ordered
        if record.completions
    )
