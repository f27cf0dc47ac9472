"""The critic of PPO: a value model that learns beside the policy.

Its engine, what it says about a batch and its optimizer steps are here; advantages and the loss are
formulas of ``algorithms``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDict

from tandem.algorithms.aggregation import loss_weights
from tandem.algorithms.value import ValueObjective, explained_variance
from tandem.config import CriticConfig, RLConfig
from tandem.launch import open_engine
from tandem.observe import mean_metrics
from tandem.train import TrainEngine
from tandem.trainers.rl_batch import split_episodes
from tandem.types import FinetuneSpec

Metrics = dict[str, float]


class Critic:
    """Predicts ``values``, then learns the ``returns`` that were computed with them."""

    def __init__(self, config: CriticConfig, engine: TrainEngine) -> None:
        self.config = config
        self.engine = engine
        self._objective = ValueObjective(clip=config.clip)

    def predict(self, batch: TensorDict) -> None:
        """Write ``values``, and ``bootstrap_values`` that are 0 where the response ended."""
        names = ("values", "bootstrap_values")
        with self.engine.eval_mode():
            found = self.engine.forward(batch, outputs=names, trained_only=True)
        goes_on_B = batch["truncated"] & self.config.bootstrap_truncated
        batch["values"] = found["values"]
        batch["bootstrap_values"] = torch.where(goes_on_B, found["bootstrap_values"], 0.0)

    def learn(
        self, batch: TensorDict, *, epochs: int, num_minibatches: int, beat: Callable[[], None]
    ) -> Metrics:
        """The optimizer steps of one training batch, which has ``values`` and ``returns``."""
        steps = []
        with self.engine.train_mode():
            for part in split_episodes(batch, self.config.epochs or epochs, num_minibatches):
                part["value_loss_weights"] = loss_weights(
                    self.config.aggregation, part["loss_mask"], sample_ids=part["sample_ids"]
                )
                steps.append(self.engine.train_batch(part, self._objective))
                self.engine.lr_scheduler_step()
                beat()
        means = mean_metrics(steps)
        metrics = {n if "/" in n else f"critic/{n}": value for n, value in means.items()}
        explained = explained_variance(batch["values"], batch["returns"], batch["loss_mask"])
        if explained is not None:
            metrics["critic/explained_variance"] = explained
        return metrics


def open_critic(config: RLConfig, policy_path: str) -> Critic:
    """The critic of ``config``, from ``policy_path`` unless it has a path of its own."""
    critic = config.critic
    assert critic is not None
    epochs = critic.epochs or config.algorithm.epochs
    num_steps = config.steps * epochs * config.algorithm.minibatches
    engine = open_engine(
        "value_model",
        critic.train,
        model_path=critic.path or policy_path,
        lora=critic.lora,
        seed=config.run.seed,
        tokenizer_path=critic.path or config.model.tokenizer_path,
        ft_spec=FinetuneSpec(1, dataset_size=num_steps, train_batch_size=1),
    )
    return Critic(critic, engine)
