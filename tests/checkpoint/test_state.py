import json
import math

import pytest

from tandem.checkpoint import read_state, write_state
from tandem.errors import CheckpointError


def round_trip(tmp_path, obj, **kwargs):
    write_state(tmp_path / "state.json", obj, **kwargs)
    return read_state(tmp_path / "state.json")


@pytest.mark.parametrize(
    "value",
    [
        0.1,
        1 / 3,
        5e-324,
        1.7976931348623157e308,
        -0.0,
        2**53 + 1,
        -(10**30),
        True,
        None,
        "ü\u2028\ud800\x00",
        b"\x00\xff",
        (),
        (1, (2.5, [3])),
        [],
        {},
        {"$tuple": [1]},
        {1: "a", "1": "b", (2, 3): "c", None: "d"},
        {"a": {"b": (b"x", {"c": 1.0})}},
    ],
    ids=repr,
)
def test_value_and_type_survive(tmp_path, value):
    got = round_trip(tmp_path, value)
    assert repr(got) == repr(value)
    assert got == value


def test_int_and_float_of_equal_value_stay_apart(tmp_path):
    got = round_trip(tmp_path, [1, 1.0, True])
    assert [type(item) for item in got] == [int, float, bool]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_is_refused_by_place_unless_asked_for(tmp_path, value):
    with pytest.raises(CheckpointError, match=r"state\['loss'\]\[1\]"):
        write_state(tmp_path / "state.json", {"loss": [0.0, value]})
    assert not (tmp_path / "state.json").exists()
    got = round_trip(tmp_path, {"loss": [0.0, value]}, allow_nonfinite=True)
    assert repr(got["loss"][1]) == repr(value)


@pytest.mark.parametrize("value", [{1, 2}, object(), 1 + 2j])
def test_type_that_would_not_come_back_is_refused(tmp_path, value):
    with pytest.raises(CheckpointError, match=type(value).__name__):
        write_state(tmp_path / "state.json", {"x": value})


@pytest.mark.parametrize(
    "text", ["", "{", "[NaN]", '{"$set": [1]}', '{"$tuple": [], "a": 1}', '{"$bytes": "?"}', "\xff"]
)
def test_damaged_file_is_refused(tmp_path, text):
    (tmp_path / "state.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"state\.json"):
        read_state(tmp_path / "state.json")


def test_rewriting_leaves_one_file(tmp_path):
    round_trip(tmp_path, 1)
    assert round_trip(tmp_path, 2) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_failed_write_keeps_the_old_file(tmp_path):
    write_state(tmp_path / "state.json", "old")
    with pytest.raises(CheckpointError):
        write_state(tmp_path / "state.json", math.nan)
    assert json.loads((tmp_path / "state.json").read_text()) == "old"
