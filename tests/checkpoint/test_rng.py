import random

import numpy as np
import pytest
import torch

from tandem.checkpoint import (
    capture_rng,
    read_state,
    read_tensors,
    restore_rng,
    write_state,
    write_tensors,
)
from tandem.errors import CheckpointError


@pytest.fixture(autouse=True)
def _keep_global_generators():
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def draw():
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.normal(size=3).tolist(),
        torch.randn(3).tolist(),
    )


def test_generators_go_on_where_they_were_after_a_round_trip_through_files(tmp_path):
    draw()  # leaves the second half of a pair of gaussians in python's and numpy's generators
    tensors, state = capture_rng()
    write_tensors(tmp_path / "rng.safetensors", tensors)
    write_state(tmp_path / "rng.json", state)
    expected = [draw(), draw()]
    restore_rng(read_tensors(tmp_path / "rng.safetensors"), read_state(tmp_path / "rng.json"))
    assert [draw(), draw()] == expected


def test_missing_part_is_refused():
    tensors, state = capture_rng()
    with pytest.raises(CheckpointError, match="numpy"):
        restore_rng(tensors, {key: value for key, value in state.items() if key != "numpy"})


def test_devices_of_another_machine_are_named_in_the_log(caplog):
    tensors, state = capture_rng()
    restore_rng(tensors, {**state, "num_cuda": torch.cuda.device_count() + 1})
    assert f"cuda:{torch.cuda.device_count()}" in caplog.text
