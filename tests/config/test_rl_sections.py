"""Sections of an RL run that only make sense together."""

from __future__ import annotations

import pytest

from tandem.config import RLConfig, load_config
from tandem.errors import ConfigError

MINIMAL = {"kind": "rl", "model": {"path": "m"}, "data": {"source": "jsonl", "path": "p"}}
EVAL = ("eval.data.source=jsonl", "eval.data.path=q")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.advantage=gae"], "algorithm.advantage=gae needs a critic"),
        (["critic.clip=0.5"], "critic: only algorithm.advantage=gae uses one, got 'grpo'"),
        (
            ["algorithm.advantage=gae", "critic.warmup_steps=9", "steps=9"],
            r"critic.warmup_steps: got 9, allowed: < steps \(9\)",
        ),
        (["rollout.reward.name=model"], "rollout.reward.name=model needs reward_model.path"),
        (
            ["rollout.reward.name=model", "reward_model.path=r", *EVAL],
            "eval.reward is required with rollout.reward.name=model",
        ),
        (
            ["rollout.reward.name=model", "reward_model.path=r", "rollout.drop_zero_variance=true"],
            "rollout.drop_zero_variance sees the rewards of the rollout",
        ),
        (["algorithm.advantage=teacher_reverse_kl"], "needs teacher.path"),
        (["teacher.path=t"], "teacher: nothing uses it; set teacher.top_k"),
        (["algorithm.advantage=none"], "algorithm.advantage=none learns nothing"),
        (["algorithm.kl_in_reward=true"], "algorithm.kl_in_reward needs algorithm.kl_coef > 0"),
        (
            ["algorithm.kl_coef=0.1", "algorithm.kl_target=1"],
            "algorithm.kl_target needs algorithm.kl_in_reward=true",
        ),
        (
            ["algorithm.shaping.overlong_cache=65"],
            r"algorithm.shaping.overlong_cache: got 65, allowed: up to .* \(64\)",
        ),
        (
            ["algorithm.shaping.min_tokens=5", "algorithm.shaping.max_tokens=4"],
            r"algorithm.shaping.min_tokens: got 5, allowed: <= max_tokens \(4\)",
        ),
        (["algorithm.corrections=[{metod: tis}]"], "algorithm.corrections.0.method: this key"),
    ],
)
def test_sections_that_do_not_fit_are_refused(overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        load_config(MINIMAL, overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.advantage=gae", "critic={}"],
        ["rollout.reward.name=model", "reward_model.path=r", *EVAL, "eval.reward.name=exact_match"],
        ["reward_model.path=r", "reward_model.weight=0.5", "rollout.drop_zero_variance=true"],
        ["algorithm.advantage=teacher_forward_kl", "teacher.path=t"],
        ["teacher.path=t", "teacher.top_k=8", "algorithm.advantage=none"],
        ["teacher.path=t", "teacher.top_k=8"],
        ["algorithm.corrections=[{method: veto, kwargs: {low: 1e-3}}, {method: tis}]"],
    ],
)
def test_sections_that_fit_are_accepted(overrides: list[str]):
    assert isinstance(load_config(MINIMAL, overrides), RLConfig)
