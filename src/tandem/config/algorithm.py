"""The sections that say what a reinforcement-learning run optimises, and the models it asks.

Rollout, engines and the run's own sections are in ``schema``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from tandem.config.section import (
    Dtype,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
)

TEACHER_ADVANTAGES = ("teacher_reverse_kl", "teacher_forward_kl")
"""Advantages that compare sampled tokens with the section ``teacher``."""

TOKEN_CORRECTIONS = ("decoupled_cap", "tis", "icepop")
"""Corrections that look at each token alone and leave the loss mask as it is."""

Aggregation = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]


class CorrectionConfig(Section):
    """One correction for a sampler that is not the policy; ``kwargs`` are the method's own."""

    method: str
    kwargs: dict[str, Any] = {}


class ShapingConfig(Section):
    """What happens to rewards between rollout and advantages, in this order."""

    truncated_reward: float | None = Field(
        None, description="the reward of samples cut by a length limit; None: their own"
    )
    overlong_cache: PositiveInt | None = Field(
        None,
        description="DAPO: the penalty grows over so many tokens before "
        "rollout.generation.max_new_tokens; None: none",
    )
    overlong_factor: PositiveFloat = Field(1.0, description="the penalty at the limit")
    min_tokens: PositiveInt | None = Field(
        None, description="shorter samples are left out of loss and statistics"
    )
    max_tokens: PositiveInt | None = Field(None, description="the same for longer ones")

    @model_validator(mode="after")
    def _range(self) -> Self:
        low, high = self.min_tokens, self.max_tokens
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"ShapingConfig.min_tokens: got {low}, allowed: <= max_tokens ({high})"
            )
        return self


class AlgorithmConfig(Section):
    advantage: str = "grpo"
    advantage_kwargs: dict[str, Any] = {}
    policy_loss: str = "ppo_clip"
    policy_kwargs: dict[str, Any] = Field({}, description="of the policy loss, beside the clips")
    clip_low: NonNegativeFloat | None = Field(None, description="None: the policy loss's own")
    clip_high: NonNegativeFloat | None = Field(None, description="None: the policy loss's own")
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    aggregation: Aggregation = "token-mean"
    horizon: PositiveInt | None = Field(None, description="divisor of seq-mean-token-sum-norm")
    corrections: tuple[CorrectionConfig, ...] = Field(
        (),
        description="weights and rejections by prox / sampler probability, one after the other; "
        "[{method: decoupled_cap}] is decoupled PPO",
    )
    prox: Literal["recompute", "loglinear"] = Field(
        "recompute",
        description="log-probabilities that the ratio starts from: a pass before the first step, "
        "or, without one, on the line from the sampler's to the policy's own by the token's age",
    )
    kl_coef: NonNegativeFloat = 0.0
    kl_estimator: Literal["k1", "k2", "k3", "abs"] | None = Field(
        None, description="None: k3 in the loss, k1 in the reward"
    )
    kl_in_reward: bool = Field(False, description="kl_coef penalises tokens' rewards, not the loss")
    kl_target: PositiveFloat | None = Field(
        None, description="divergence a response that kl_coef is steered to (in the reward only)"
    )
    kl_horizon: PositiveInt = Field(10_000, description="responses over which kl_coef adapts")
    entropy_coef: NonNegativeFloat = 0.0
    log_entropy: bool = Field(
        False, description="the metric actor/entropy also without entropy_coef; costs some time"
    )
    epochs: PositiveInt = 1
    minibatches: PositiveInt = 1
    mask_truncated: bool = False
    shaping: ShapingConfig = ShapingConfig()

    @model_validator(mode="after")
    def _meaningful(self) -> Self:
        if self.kl_in_reward and self.kl_coef == 0:
            raise ValueError("algorithm.kl_in_reward needs algorithm.kl_coef > 0")
        if self.kl_target is not None and not self.kl_in_reward:
            raise ValueError("algorithm.kl_target needs algorithm.kl_in_reward=true")
        if self.aggregation == "seq-mean-token-sum-norm" and self.horizon is None:
            raise ValueError("algorithm.horizon is required by seq-mean-token-sum-norm")
        return self

    @model_validator(mode="after")
    def _interpolated(self) -> Self:
        if self.prox == "recompute":
            return self
        needs = {
            f"algorithm.policy_loss={self.policy_loss}": self.policy_loss == "clip_cov",
            f"algorithm.advantage={self.advantage}": self.advantage in TEACHER_ADVANTAGES,
            "algorithm.kl_in_reward=true": self.kl_in_reward,
        }
        for what, is_so in needs.items():
            if is_so:
                raise ValueError(
                    f"algorithm.prox=loglinear: {what} needs the log-probabilities before the "
                    "first step; use recompute"
                )
        if len(self.corrections) > 1 or any(
            item.method not in TOKEN_CORRECTIONS
            or item.kwargs.get("normalise")
            or item.kwargs.get("drop_from_denominator")
            for item in self.corrections
        ):
            raise ValueError(
                "algorithm.corrections with algorithm.prox=loglinear: allowed is one of "
                f"{', '.join(TOKEN_CORRECTIONS)} without normalise and drop_from_denominator; "
                "others need the whole step before it"
            )
        return self


class FrozenModelConfig(Section):
    """A model that only scores; it has the policy's vocabulary."""

    path: str
    backend: str = "local"
    device: str | None = None
    dtype: Dtype = "float32"
    max_tokens_per_microbatch: PositiveInt = 4096
    offload_params: bool = False


class ScoringModelConfig(FrozenModelConfig):
    """A reward model; ``weight`` times its score is added to the reward of the rollout."""

    weight: PositiveFloat = 1.0


class TeacherConfig(FrozenModelConfig):
    """The model to imitate: by an advantage ``teacher_*`` on the sampled tokens, or with ``top_k``
    by a term of the loss over its likeliest tokens and the rest taken together."""

    top_k: PositiveInt | None = None
    divergence: Literal["forward", "reverse", "jsd"] = Field("reverse", description="with top_k")
    coef: PositiveFloat = Field(1.0, description="times the divergence, with top_k")
