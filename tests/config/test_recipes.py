"""Every shipped recipe is a valid configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.config import RLConfig, load_config, resolve_recipe

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
