"""The configuration of a reinforcement-learning run, and the sections that only it has.

What it optimises is in ``algorithm``; sections that other runs have too are in ``schema``.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from tandem.config.algorithm import (
    TEACHER_ADVANTAGES,
    AlgorithmConfig,
    ScoringModelConfig,
    TeacherConfig,
)
from tandem.config.schema import (
    DataConfig,
    EvalConfig,
    InferenceConfig,
    LoraConfig,
    RolloutConfig,
    Root,
    SFTStageConfig,
    TrainConfig,
)
from tandem.config.section import NonNegativeInt, PositiveFloat, PositiveInt, Section


class CriticConfig(Section):
    """The value model of PPO (``algorithm.advantage: gae``), an engine beside the policy's."""

    path: str | None = Field(
        None, description="a value or reward model, or a language model; None: the policy's start"
    )
    lora: LoraConfig | None = None
    train: TrainConfig = TrainConfig()
    clip: PositiveFloat | None = Field(
        0.2, description="how far a value moves in one training batch; None: no clipping"
    )
    aggregation: Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"] = (
        "token-mean"
    )
    epochs: PositiveInt | None = Field(None, description="None: algorithm.epochs")
    warmup_steps: NonNegativeInt = Field(
        0, description="training steps at the start that leave the policy as it is"
    )
    bootstrap_truncated: bool = Field(
        True,
        description="a response cut by a length limit goes on with the value of its last state; "
        "false: it ended there",
    )


class StoreConfig(Section):
    """How long the trajectory store keeps what was trained on or dropped.

    What the oldest kept checkpoint may need stays in any case.
    """

    keep_steps: PositiveInt | None = Field(None, description="steps of training; None: all")
    max_size_mb: PositiveInt = Field(
        2048, description="contents beyond it go, the oldest first (MiB)"
    )


class RLConfig(Root):
    """A run of reinforcement learning; ``warmup`` is an optional supervised stage before it."""

    kind: Literal["rl"] = "rl"
    warmup: SFTStageConfig | None = None
    data: DataConfig
    train: TrainConfig = TrainConfig()
    inference: InferenceConfig = InferenceConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig | None = None
    reward_model: ScoringModelConfig | None = None
    teacher: TeacherConfig | None = None
    store: StoreConfig = StoreConfig()
    eval: EvalConfig = EvalConfig()
    steps: PositiveInt = 100

    @model_validator(mode="after")
    def _trainable(self) -> Self:
        rollout, algorithm = self.rollout, self.algorithm
        changed = rollout.generation.untrainable_fields()
        if changed:
            raise ValueError(
                f"rollout.generation.{changed[0]} changes the sampled distribution, which training "
                "cannot replay; use the neutral value (top_p 1, top_k 0, min_p 0, penalties off, "
                "temperature > 0)"
            )
        if rollout.generation.n_samples != 1:
            raise ValueError("rollout.generation.n_samples: use rollout.group_size instead")
        if rollout.batch_size % algorithm.minibatches:
            raise ValueError(
                f"rollout.batch_size ({rollout.batch_size}) must be a multiple of "
                f"algorithm.minibatches ({algorithm.minibatches})"
            )
        if rollout.min_group_size > rollout.group_size:
            raise ValueError("rollout.min_group_size must be <= rollout.group_size")
        cache, limit = algorithm.shaping.overlong_cache, rollout.generation.max_new_tokens
        if cache is not None and cache > limit:
            raise ValueError(
                f"algorithm.shaping.overlong_cache: got {cache}, allowed: up to "
                f"rollout.generation.max_new_tokens ({limit})"
            )
        return self

    @model_validator(mode="after")
    def _critic_is_used(self) -> Self:
        needs_critic = self.algorithm.advantage == "gae"
        if needs_critic and self.critic is None:
            raise ValueError("algorithm.advantage=gae needs a critic; add the section critic: {}")
        if self.critic is None:
            return self
        if not needs_critic:
            raise ValueError(
                "critic: only algorithm.advantage=gae uses one, got "
                f"{self.algorithm.advantage!r}; leave the section out"
            )
        if self.critic.warmup_steps >= self.steps:
            raise ValueError(
                f"critic.warmup_steps: got {self.critic.warmup_steps}, allowed: < steps "
                f"({self.steps}), or the policy never learns"
            )
        return self

    @model_validator(mode="after")
    def _reward_model_is_used(self) -> Self:
        if self.rollout.reward.name != "model":
            return self
        if self.reward_model is None:
            raise ValueError("rollout.reward.name=model needs reward_model.path")
        if self.rollout.drop_zero_variance:
            raise ValueError(
                "rollout.drop_zero_variance sees the rewards of the rollout, which "
                "rollout.reward.name=model leaves at 0"
            )
        if self.eval.data is not None and self.eval.reward is None:
            raise ValueError("eval.reward is required with rollout.reward.name=model")
        return self

    @model_validator(mode="after")
    def _baseline_is_of_the_rollout(self) -> Self:
        """ReMax and GDPO know only what the rollout rewarded."""
        algorithm, shaping = self.algorithm, self.algorithm.shaping
        advantage = algorithm.advantage
        if advantage not in ("remax", "gdpo"):
            return self
        if self.reward_model is not None:
            raise ValueError(
                f"algorithm.advantage={advantage} cannot use the section reward_model, which "
                "scores after the rollout; leave it out"
            )
        if advantage == "remax":
            return self
        if not self.rollout.reward.part_weights:
            raise ValueError(
                "algorithm.advantage=gdpo needs rollout.reward.parts, or rollout.reward.weights "
                "for a reward that returns several numbers"
            )
        penalties = {
            "kl_in_reward": algorithm.kl_in_reward,
            "shaping.overlong_cache": shaping.overlong_cache is not None,
            "shaping.truncated_reward": shaping.truncated_reward is not None,
        }
        for name, is_set in penalties.items():
            if is_set:
                raise ValueError(
                    f"algorithm.{name} changes the sum of the rewards, of which "
                    "algorithm.advantage=gdpo sees the parts; leave it out"
                )
        return self

    @model_validator(mode="after")
    def _teacher_is_used(self) -> Self:
        advantage = self.algorithm.advantage
        by_samples = advantage in TEACHER_ADVANTAGES
        if by_samples and self.teacher is None:
            raise ValueError(f"algorithm.advantage={advantage} needs teacher.path")
        has_top_k = self.teacher is not None and self.teacher.top_k is not None
        if self.teacher is not None and not by_samples and not has_top_k:
            raise ValueError(
                "teacher: nothing uses it; set teacher.top_k, or algorithm.advantage to "
                f"{' or '.join(TEACHER_ADVANTAGES)}"
            )
        if advantage == "none" and not has_top_k:
            raise ValueError("algorithm.advantage=none learns nothing without teacher.top_k")
        return self

    @model_validator(mode="after")
    def _deterministic(self) -> Self:
        if self.inference.deterministic:
            if self.algorithm.prox != "recompute":
                raise ValueError(
                    "inference.deterministic compares with algorithm.prox=recompute, got "
                    f"{self.algorithm.prox!r}"
                )
            found = {
                "train.dtype": (self.train.dtype, "float32"),
                "train.device": (self.train.device, "cpu"),
                "run.threads": (self.run.threads, 1),
            }
            for name, (value, needed) in found.items():
                if value != needed:
                    raise ValueError(
                        f"inference.deterministic needs {name}={needed}, got {value!r}"
                    )
        return self
