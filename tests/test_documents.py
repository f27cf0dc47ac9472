"""What the README and its neighbours promise exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tandem.cli import app
from tandem.config import load_config
from tandem.config.parse import parse_yaml

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    path for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")) if path.name[0] != "."
]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text(encoding="utf-8"))
    missing = [target for target in targets if not (path.parent / target).exists()]
    assert not missing


def test_readme_configurations_are_valid() -> None:
    texts = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    rl, sft, dpo = (load_config(parse_yaml(text)) for text in texts)
    assert rl.rollout.reward.name == "my_reward.py:score"
    assert sft.sft.data.path == "demonstrations.jsonl"
    assert dpo.dpo.data.path == "pairs.jsonl"


def test_readme_names_every_verb_and_no_other() -> None:
    named = set(re.findall(r"^\| `tandem ([a-z]+)", README, re.MULTILINE))
    verbs = {item.name for item in app.registered_commands}
    groups = {item.name for item in app.registered_groups}
    assert named == verbs | groups


def test_readme_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`?make ([a-z0-9-]+)", README):
        assert re.search(rf"^{target}\b.*:", makefile, re.MULTILINE), target


def test_readme_recipes_are_those_shipped() -> None:
    table = README.split("## Recipes")[1].split("## Commands")[0]
    cells = re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`([a-z0-9-]+)`", cell)}
    assert named == {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
