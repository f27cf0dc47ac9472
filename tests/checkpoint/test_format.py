"""Files that the safetensors library reads, and digests of what is in them."""

import hashlib

import pytest
import torch
from safetensors import safe_open

from tandem.checkpoint import format as file_format
from tandem.checkpoint.format import DTYPES, write_safetensors
from tandem.errors import CheckpointError


def test_the_library_reads_every_dtype_and_shape_bit_for_bit(tmp_path):
    tensors = {"scalar": torch.tensor(7), "none": torch.empty(0, 3), "e": torch.ones(1)}
    for number, dtype in enumerate(DTYPES):
        raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % 2
        tensors[f"t{number}"] = raw.view(dtype).view(2, 3)
    path = tmp_path / "file.safetensors"
    write_safetensors(path, tensors, {"format": "pt"})
    with safe_open(str(path), framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            found = file.get_tensor(name)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
            assert found.reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))


def test_the_digest_is_that_of_the_whole_file(tmp_path, monkeypatch):
    monkeypatch.setattr(file_format, "_PIECE", 64)
    path = tmp_path / "file.safetensors"
    digest = write_safetensors(path, {"w": torch.randn(100), "b": torch.randn(3).half()}, {})
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_dtype_without_a_name_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"w: dtype torch.complex128"):
        write_safetensors(tmp_path / "f", {"w": torch.zeros(2, dtype=torch.complex128)}, {})


def test_a_file_may_be_replaced_by_tensors_that_are_mapped_from_it(tmp_path):
    path = tmp_path / "file.safetensors"
    write_safetensors(path, {"w": torch.arange(5000.0)}, {})
    mapped = torch.from_file(str(path), size=path.stat().st_size // 4, dtype=torch.float32)
    expected = mapped.clone()
    write_safetensors(path, {"w": mapped}, {})
    with safe_open(str(path), framework="pt") as file:
        found = file.get_tensor("w")
    assert found.view(torch.uint8).equal(expected.view(torch.uint8))
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
