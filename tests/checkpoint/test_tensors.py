import pytest
import torch
from safetensors.torch import load_file

from tandem.checkpoint import read_tensors, write_tensors
from tandem.errors import CheckpointError


def test_values_shapes_and_dtypes_survive_bit_for_bit(tmp_path):
    tensors = {
        "f32": torch.tensor([float("nan"), -0.0, 1e-45, float("inf")]),
        "bf16": torch.randn(3, 2).bfloat16(),
        "transposed": torch.arange(6).view(2, 3).t(),
        "row_of_more": torch.arange(10.0)[3:5],
        "scalar": torch.tensor(7, dtype=torch.int64),
        "bool": torch.tensor([True, False]),
        "empty": torch.empty(0, 4),
        "another_empty": torch.empty(0),
    }
    write_tensors(tmp_path / "t.safetensors", tensors)
    got = read_tensors(tmp_path / "t.safetensors")
    assert set(got) == set(tensors)
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype
        assert got[name].shape == tensor.shape
        expected = tensor.contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(got[name].reshape(-1).view(torch.uint8), expected), name


def test_tied_names_are_written_once_and_alias_after_reading(tmp_path):
    shared = torch.randn(4, 3)
    write_tensors(tmp_path / "t", {"embed": shared, "head": shared, "copy": shared.clone()})
    assert len(load_file(tmp_path / "t")) == 2
    got = read_tensors(tmp_path / "t")
    assert got["head"].data_ptr() == got["embed"].data_ptr()
    assert got["copy"].data_ptr() != got["embed"].data_ptr()


def test_head_with_its_own_memory_is_kept_although_it_began_equal(tmp_path):
    embed = torch.randn(4, 3)
    head = embed.clone()
    head[0, 0] += 1.0
    write_tensors(tmp_path / "t", {"embed": embed, "head": head})
    got = read_tensors(tmp_path / "t")
    assert torch.equal(got["head"], head)
    assert torch.equal(got["embed"], embed)


def test_views_of_one_memory_with_different_shapes_are_not_tied(tmp_path):
    base = torch.arange(12.0)
    write_tensors(tmp_path / "t", {"flat": base, "matrix": base.view(3, 4), "part": base[:4]})
    got = read_tensors(tmp_path / "t")
    assert torch.equal(got["matrix"], base.view(3, 4))
    assert torch.equal(got["part"], base[:4])


def test_truncated_file_is_refused(tmp_path):
    write_tensors(tmp_path / "t", {"a": torch.ones(100)})
    data = (tmp_path / "t").read_bytes()
    (tmp_path / "t").write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match="/t: "):
        read_tensors(tmp_path / "t")


def test_missing_file_and_unwritable_place_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="absent"):
        read_tensors(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="no_folder"):
        write_tensors(tmp_path / "no_folder" / "t", {"a": torch.ones(1)})
