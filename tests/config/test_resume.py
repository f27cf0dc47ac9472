"""What may change between a run and its resumption."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.config import RESUMABLE_CHANGES, RLConfig, check_resume, load_config
from tandem.config.keys import key_paths
from tandem.config.load import KINDS
from tandem.errors import ConfigError

BASE: dict[str, Any] = {"model": {"tiny": {}}, "data": {"task": "chain_sum", "size": 10}}


def load(*overrides: str) -> RLConfig:
    return load_config(BASE, overrides, kind="rl")


@pytest.mark.parametrize(
    "override",
    [
        "steps=7",
        "tracking.progress=false",
        "checkpoint.keep=null",
        "eval.every=3",
        "run.threads=2",
        "train.backend=fsdp",
        "train.parallel.tensor=2",
    ],
)
def test_how_long_and_how_watched_may_change(override: str) -> None:
    check_resume(load(), load(override))


def test_every_other_change_is_listed_with_both_values() -> None:
    with pytest.raises(ConfigError) as caught:
        check_resume(
            load(), load("train.lr=1e-3", "run.seed=4", "steps=9", "rollout.generation.stop=[a]")
        )
    assert str(caught.value).split("\n")[:-1] == [
        "rollout.generation.stop: the run has [], got ['a']",
        "run.seed: the run has 0, got 4",
        "train.lr: the run has 1e-05, got 0.001",
    ]
    assert "--resume" in str(caught.value).split("\n")[-1]


def test_a_section_that_appears_is_a_change() -> None:
    with pytest.raises(ConfigError, match=r"model\.lora\.rank"):
        check_resume(load(), load("model.lora.rank=4"))


def test_every_declared_pattern_speaks_of_a_key_that_exists() -> None:
    from fnmatch import fnmatchcase

    known = {".".join(path) for root in KINDS.values() for path in key_paths(root)}
    for pattern in RESUMABLE_CHANGES:
        assert any(fnmatchcase(key, pattern) for key in known), pattern
