"""A configuration file that says only what differs from another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.config import load_config, to_yaml
from tandem.errors import ConfigError

BASE = """
kind: rl
model: {tiny: {hidden_size: 32}}
data: {source: jsonl, path: rows.jsonl, columns: {question: q}}
train: {lr: 1.0e-3, betas: [0.8, 0.9]}
algorithm: {clip_high: 0.3}
"""


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


def test_sections_merge_key_by_key_and_other_values_replace(tmp_path: Path):
    text = "base: base.yaml\ntrain: {lr: 2.0e-3, betas: [0.5, 0.6]}\nalgorithm: {clip_high: null}\n"
    config = load_config(write(tmp_path, base=BASE, child=text) / "child.yaml", ["train.lr=5e-3"])
    assert config.train.lr == 5e-3
    assert config.train.betas == (0.5, 0.6)
    assert config.algorithm.clip_high is None
    assert config.model.tiny.hidden_size == 32
    assert config.data.columns == {"question": "q"}
    assert "base" not in to_yaml(config)


def test_bases_are_found_beside_the_file_that_names_them(tmp_path: Path):
    inner = tmp_path / "inner"
    inner.mkdir()
    write(tmp_path, middle="base: inner/base.yaml\nsteps: 7\n", top="base: middle.yaml\n")
    write(inner, base=BASE)
    assert load_config(tmp_path / "top.yaml").steps == 7


def test_a_section_may_be_taken_out_again(tmp_path: Path):
    child = "base: base.yaml\nmodel: {tiny: null, path: somewhere}\n"
    config = load_config(write(tmp_path, base=BASE, child=child) / "child.yaml")
    assert config.model.tiny is None
    assert config.model.path == "somewhere"


def test_the_base_of_a_mapping_is_found_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(write(tmp_path, base=BASE))
    given = {"base": "base.yaml", "steps": 3}
    assert load_config(given).steps == 3
    assert given == {"base": "base.yaml", "steps": 3}


def test_a_circle_is_refused_and_named(tmp_path: Path):
    write(
        tmp_path, a="base: b.yaml\n", b="base: c.yaml\n", c="base: ./b.yaml\n", me="base: me.yaml"
    )
    with pytest.raises(ConfigError, match=r"base: a.yaml -> b.yaml -> c.yaml -> b.yaml leads back"):
        load_config(tmp_path / "a.yaml")
    with pytest.raises(ConfigError, match=r"me.yaml -> me.yaml leads back to itself"):
        load_config(tmp_path / "me.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: nowhere.yaml\n", r"nowhere.yaml': No such file"),
        ("base: [base.yaml]\n", r"base: got \['base.yaml'\], allowed: the path of one YAML file"),
        ("base: base.yaml\ntrain: {lrr: 1}\n", r"unknown key 'train.lrr': did you mean 'train.lr'"),
    ],
)
def test_what_is_wrong_with_a_base_is_said(tmp_path: Path, text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, base=BASE, child=text) / "child.yaml")
