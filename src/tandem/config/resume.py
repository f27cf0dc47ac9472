"""Which keys may change between a run and its resumption. What is saved is checkpoint/'s matter."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from tandem.config.schema import Root
from tandem.errors import ConfigError

RESUMABLE_CHANGES: tuple[str, ...] = (
    "run.name",
    "run.output_dir",
    "run.threads",
    "run.stall_timeout_s",
    "steps",
    "sft.steps",
    "sft.epochs",
    "sft.checkpoint_every",
    "dpo.steps",
    "dpo.epochs",
    "dpo.checkpoint_every",
    "reward.steps",
    "reward.epochs",
    "reward.checkpoint_every",
    "warmup.checkpoint_every",
    "eval.every",
    "eval.batch_size",
    "checkpoint.*",
    "store.*",
    "tracking.*",
    "train.backend",
    "train.device",
    "train.parallel.*",
    "sft.train.backend",
    "sft.train.device",
    "sft.train.parallel.*",
    "dpo.train.backend",
    "dpo.train.device",
    "dpo.train.parallel.*",
    "reward.train.backend",
    "reward.train.device",
    "reward.train.parallel.*",
    "warmup.train.backend",
    "warmup.train.device",
    "warmup.train.parallel.*",
    "train.restart_schedule",
    "sft.train.restart_schedule",
    "dpo.train.restart_schedule",
    "reward.train.restart_schedule",
    "critic.train.restart_schedule",
    "train.gradient_checkpointing",
    "train.offload_*",
    "critic.train.backend",
    "critic.train.parallel.*",
    "critic.train.device",
    "critic.train.gradient_checkpointing",
    "critic.train.offload_*",
    "reward_model.backend",
    "reward_model.device",
    "reward_model.offload_params",
    "teacher.backend",
    "teacher.device",
    "teacher.offload_params",
    "inference.device",
    "inference.threads",
    "inference.max_batch_size",
    "inference.max_tokens_per_pass",
    "inference.cache_tokens",
    "inference.prefix_cache_mib",
    "inference.numerics",
    "inference.record_decoding",
    "inference.*_timeout_s",
    "rollout.*_timeout_s",
    "rollout.reward.max_concurrent",
    "rollout.reward.workers",
    "rollout.max_failures_in_row",
    "rollout.max_rejected_in_row",
)
"""Patterns of keys that leave what was learnt so far valid: how long, where, how it is watched."""


def check_resume(old: Root, new: Root) -> None:
    """Compare the configuration a run was started with to the one that would resume it.

    Raises:
        ConfigError: naming every changed key that is not in ``RESUMABLE_CHANGES``.
    """
    before, after = _flat(old.model_dump(mode="json")), _flat(new.model_dump(mode="json"))
    changed = [
        f"{key}: the run has {before.get(key)!r}, got {after.get(key)!r}"
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key) and not _may_change(key)
    ]
    if changed:
        changed.append("these keys cannot change on --resume; restore them or use another run.name")
        raise ConfigError("\n".join(changed))


def _may_change(key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in RESUMABLE_CHANGES)


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {path: value}
    flat: dict[str, Any] = {}
    for name, child in value.items():
        flat |= _flat(child, f"{path}.{name}" if path else str(name))
    return flat
