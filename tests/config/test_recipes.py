"""Every shipped recipe is a valid configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.config import PairRoot, RLConfig, load_config, resolve_recipe

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_loads_and_is_named_after_its_file(path: Path) -> None:
    assert resolve_recipe(path.stem) == path
    assert load_config(path).run.name == path.stem


def test_quickstart_evaluates_on_data_that_no_phase_trains_on() -> None:
    config = load_config(resolve_recipe("quickstart"), kind="rl")
    assert isinstance(config, RLConfig)
    assert config.warmup is not None
    assert config.eval.data is not None
    assert config.eval.data.split != config.data.split == config.warmup.data.split


@pytest.mark.parametrize("name", ["dpo", "reward"])
def test_pair_recipes_measure_words_that_no_phase_trains_on(name: str) -> None:
    config = load_config(resolve_recipe(name), kind=name)
    assert isinstance(config, PairRoot)
    assert config.eval.data is not None
    trained = [getattr(config, name).data, *([config.warmup.data] if config.warmup else [])]
    assert {data.split for data in trained} == {"train"}
    assert config.eval.data.split == "heldout"
