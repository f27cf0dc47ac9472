"""Objects named in a configuration are found, or the error says what is wrong with the name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.config.objects import load_function, load_object
from tandem.errors import ConfigError


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text("class Scorer:\n    limit = 3\ncalls = []\ndef score(): return 7\n")
    return path


def test_function_of_a_file_is_found_by_path(script: Path) -> None:
    assert load_object(f"{script}:score")() == 7
    assert load_object(f"{script}:Scorer.limit") == 3


def test_relative_path_starts_at_the_working_directory(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(script.parent)
    assert load_object("mine.py:score")() == 7


def test_file_runs_once_whatever_the_names_taken_from_it(script: Path) -> None:
    assert load_object(f"{script}:calls") is load_object(f"{script}:calls")


def test_object_of_an_installed_module_is_found() -> None:
    assert load_object("collections.abc:Mapping").__name__ == "Mapping"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("score", "allowed: path/to/file.py:name"),
        (":score", "allowed: path/to/file.py:name"),
        ("nowhere.py:score", "no file"),
        ("no_such_module_here:score", "importing 'no_such_module_here' failed"),
        ("collections:no_such_name", "has no 'no_such_name'"),
    ],
)
def test_bad_name_is_an_error_that_repeats_it(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_object(spec, field="reward.name")
    assert "reward.name" in str(caught.value)
    assert spec in str(caught.value)


@pytest.mark.parametrize("line", ["raise RuntimeError('boom')", "raise SystemExit('boom')"])
def test_file_that_raises_is_an_error_and_can_be_tried_again(tmp_path: Path, line: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(f"{line}\n")
    with pytest.raises(ConfigError, match="boom"):
        load_object(f"{path}:score")
    path.write_text("def score(): return 'mended'\n")
    assert load_object(f"{path}:score")() == "mended"


def test_function_is_built_in_or_found_by_path(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def double(x): return 2 * x\nnumber = 3\n")
    known = {"square": lambda x: x * x}
    assert load_function("square", known, field="a.b")(3) == 9
    assert load_function(f"{file}:double", known, field="a.b")(3) == 6
    with pytest.raises(ConfigError, match=r"a\.b: got 'cube', allowed: auto, square, path/to/file"):
        load_function("cube", known, field="a.b", also=("auto",))
    with pytest.raises(ConfigError, match=r"a\.b: .*number is a int, not a function"):
        load_function(f"{file}:number", known, field="a.b")
