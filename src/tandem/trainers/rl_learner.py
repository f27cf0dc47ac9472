"""Everything that learns from a training batch, and what it asks on the way.

    scores of a reward model -> shaped rewards and final masks
         -> log-probabilities of policy, reference and teacher -> divergence as part of the reward
         -> values -> advantages -> corrections -> steps of the critic -> steps of the policy

The policy is an engine, and so are reference, critic, reward model and teacher, where there are
any. Where batches come from and where weights go is the loop's matter (``rl``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from tandem.algorithms.advantages import assign_advantages
from tandem.algorithms.correction import behaviour_correction
from tandem.algorithms.distillation import Likeliest
from tandem.algorithms.kl import AdaptiveKL
from tandem.algorithms.objective import Recorder
from tandem.checkpoint import read_state, write_state
from tandem.config import RLConfig
from tandem.config.algorithm import TEACHER_ADVANTAGES
from tandem.launch import open_engine
from tandem.observe import mean_metrics
from tandem.train import TrainEngine
from tandem.trainers.frozen import open_frozen
from tandem.trainers.rl_batch import (
    build_objective,
    is_single_step,
    kl_estimator,
    minibatches,
    mismatch,
    reference_logprobs,
    rollout_metrics,
    score,
    select_tokens,
)
from tandem.trainers.rl_critic import Critic, open_critic
from tandem.trainers.rl_rewards import (
    add_scores,
    part_metrics,
    penalise_divergence,
    shape_rewards,
)
from tandem.types import FinetuneSpec, LossFn

Metrics = dict[str, float]

STATE_FILE = "learner.json"
EMPTY_IN_ROW = 3
"""After that many batches in which nothing was said a person is told."""

log = logging.getLogger(__name__)


@dataclass
class Learner:
    """The engines of one run and the order in which a batch passes them.

    ``reference`` is None where the policy itself gives it: without its adapter, or not at all.
    """

    config: RLConfig
    policy: TrainEngine
    reference: TrainEngine | None = None
    critic: Critic | None = None
    reward_model: TrainEngine | None = None
    teacher: TrainEngine | None = None

    def __post_init__(self) -> None:
        self.kl_coef = self.config.algorithm.kl_coef
        self.objective = build_objective(self.config.algorithm, self.config.teacher)
        self._empty_in_row = 0

    def learn(
        self,
        batch: TensorDict,
        *,
        lap: Callable[[str], None] = lambda name: None,
        beat: Callable[[], None] = lambda: None,
    ) -> Metrics:
        """Train on one batch; the metrics are a function of the batch and the engines' state.

        ``lap`` is called with the name of each part that is done, ``beat`` after every optimizer
        step. While the critic warms up the policy stays as it is.
        """
        algorithm = self.config.algorithm
        batch, metrics = self.prepare(batch)
        lap("prepare")
        if self.critic is not None:
            metrics |= self.critic.learn(
                batch, epochs=algorithm.epochs, num_minibatches=algorithm.minibatches, beat=beat
            )
            lap("critic")
        if not self._critic_warms_up():
            metrics |= self._optimise(batch, beat)
        if "prox_logprobs" in batch:
            metrics |= mismatch(batch, self.policy.get_version())
        lap("train")
        return metrics

    def prepare(self, batch: TensorDict) -> tuple[TensorDict, Metrics]:
        """What needs the whole training batch, before its first optimizer step."""
        algorithm, batch = self.config.algorithm, batch.copy()
        metrics: Metrics = {}
        if self.reward_model is not None and self.config.reward_model is not None:
            metrics |= add_scores(batch, self.reward_model, self.config.reward_model.weight)
        metrics |= rollout_metrics(batch)
        self._report_emptiness(metrics["response_length/empty_fraction"])
        parts = self.config.rollout.reward.part_weights
        if parts:
            metrics |= part_metrics(batch, parts, is_sum=algorithm.advantage == "gdpo")
        limit = self.config.rollout.generation.max_new_tokens
        metrics |= shape_rewards(batch, algorithm, max_new_tokens=limit)
        metrics |= self._score_tokens(batch)
        if algorithm.kl_in_reward:
            metrics |= self._penalise_divergence(batch)
        if self.critic is not None:
            self.critic.predict(batch)
        batch, found = assign_advantages(batch, algorithm.advantage, **self._advantage_kwargs())
        metrics |= found
        for correction in () if self.objective.interpolates else algorithm.corrections:
            batch, found = behaviour_correction(
                batch, method=correction.method, **correction.kwargs
            )
            metrics |= found
        return batch, metrics

    def _report_emptiness(self, fraction: float) -> None:
        self._empty_in_row = self._empty_in_row + 1 if fraction == 1.0 else 0
        if self._empty_in_row == EMPTY_IN_ROW:
            log.warning(
                "every response of the last %d batches was empty: nothing is learnt. Look at the "
                "reward of short answers, the stop tokens and rollout.generation",
                EMPTY_IN_ROW,
            )

    def _advantage_kwargs(self) -> dict[str, Any]:
        algorithm, given = self.config.algorithm, dict[str, Any]()
        if algorithm.advantage == "gdpo":
            given["weights"] = list(self.config.rollout.reward.part_weights.values())
        return given | algorithm.advantage_kwargs

    def _score_tokens(self, batch: TensorDict) -> Metrics:
        """Log-probabilities of the sampled tokens, and the teacher's likeliest others."""
        algorithm, metrics = self.config.algorithm, dict[str, float]()
        if self.objective.interpolates:
            version = self.policy.get_version()
            batch["prox_version"] = torch.full_like(batch["episode_ids"], version)
        elif not is_single_step(algorithm) or self._critic_warms_up():
            batch["prox_logprobs"] = score(batch, self.policy)
        if algorithm.kl_coef > 0:
            batch["ref_logprobs"] = reference_logprobs(batch, self.policy, self.reference)
        if self.teacher is None or self.config.teacher is None:
            return metrics
        if algorithm.advantage in TEACHER_ADVANTAGES:
            batch["teacher_logprobs"] = score(batch, self.teacher)
            gap_N = (batch["prox_logprobs"] - batch["teacher_logprobs"])[batch["loss_mask"]]
            if len(gap_N):
                metrics["actor/teacher_kl"] = float(gap_N.mean())
        if self.config.teacher.top_k is not None:
            ids, logprobs = likeliest(batch, self.teacher, self.config.teacher.top_k)
            batch["candidate_ids"], batch["candidate_teacher_logprobs"] = ids, logprobs
        return metrics

    def _penalise_divergence(self, batch: TensorDict) -> Metrics:
        algorithm = self.config.algorithm
        kl, metrics = penalise_divergence(batch, self.kl_coef, kl_estimator(algorithm))
        metrics["actor/kl_coef"] = self.kl_coef
        if algorithm.kl_target is not None and not self._critic_warms_up():
            controller = AdaptiveKL(self.kl_coef, algorithm.kl_target, algorithm.kl_horizon)
            num_responses = int(batch["sample_ids"].unique().numel())
            self.kl_coef = controller.updated(kl, num_responses).coef
        return metrics

    def _optimise(self, batch: TensorDict, beat: Callable[[], None]) -> Metrics:
        algorithm, policy = self.config.algorithm, self.policy
        objective: LossFn = self.objective
        if self.objective.single_step:
            objective = Recorder(self.objective, batch)
        steps = []
        with policy.train_mode():
            for minibatch in minibatches(batch, algorithm):
                minibatch = select_tokens(minibatch, policy, algorithm)
                steps.append(policy.train_batch(minibatch, objective))
                policy.lr_scheduler_step()
                beat()
        means = mean_metrics(steps)
        return {n if "/" in n else f"actor/{n}": value for n, value in means.items()}

    def _critic_warms_up(self) -> bool:
        # Every training batch makes one version, so the version counts the batches before this.
        critic = self.config.critic
        return critic is not None and self.policy.get_version() < critic.warmup_steps

    # --- files ----------------------------------------------------------------------------------

    def save(self, folder: Path, step: int) -> None:
        """Write the state of everything that learns into a run's staging."""
        self.policy.save_checkpoint(str(folder / "policy"), global_step=step)
        if self.critic is not None:
            self.critic.engine.save_checkpoint(str(folder / "critic"), global_step=step)
        write_state(folder / STATE_FILE, {"kl_coef": self.kl_coef})

    def load(self, folder: Path) -> None:
        """The inverse of ``save``."""
        if self.critic is not None:
            self.critic.engine.load_checkpoint(str(folder / "critic"))
        self.policy.load_checkpoint(str(folder / "policy"))
        self.kl_coef = read_state(folder / STATE_FILE)["kl_coef"]


def likeliest(batch: TensorDict, teacher: TrainEngine, count: int) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities ``[B, T, K]`` of the teacher's ``count`` likeliest tokens.

    Index t is about the place of token t, at the row's temperature.
    """
    rows = teacher.forward(batch, post_hook=Likeliest(count), aggregate_fn=list)
    ids, logprobs = zip(*rows, strict=True)
    return torch.stack(ids), torch.stack(logprobs)


@contextmanager
def open_learner(config: RLConfig, model_path: str) -> Iterator[Learner]:
    """All engines that ``config`` asks for, at the start of training; released at the end."""
    seed = config.run.seed
    with ExitStack() as stack:

        def kept(engine: TrainEngine) -> TrainEngine:
            stack.callback(engine.destroy)
            return engine

        learner = Learner(config, kept(_open_policy(config, model_path)))
        if config.algorithm.kl_coef > 0 and config.model.lora is None:
            learner.reference = kept(_open_policy(config, model_path))
        if config.critic is not None:
            learner.critic = open_critic(config, model_path)
            kept(learner.critic.engine)
        if config.reward_model is not None:
            learner.reward_model = kept(open_frozen(config.reward_model, "reward_model", seed=seed))
        if config.teacher is not None:
            learner.teacher = kept(open_frozen(config.teacher, "language_model", seed=seed))
        yield learner


def _open_policy(config: RLConfig, model_path: str) -> TrainEngine:
    warmup = config.critic.warmup_steps if config.critic else 0
    per_batch = config.algorithm.epochs * config.algorithm.minibatches
    num_steps = (config.steps - warmup) * per_batch
    return open_engine(
        "language_model",
        config.train,
        model_path=model_path,
        lora=config.model.lora,
        seed=config.run.seed,
        tokenizer_path=config.model.tokenizer_path,
        ft_spec=FinetuneSpec(1, dataset_size=num_steps, train_batch_size=1),
    )
