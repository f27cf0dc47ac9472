"""Files of tensors that are laid out in memory and written past the page cache."""

import errno
import hashlib
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tandem.checkpoint import image as module
from tandem.checkpoint.image import image_of, write_images
from tandem.errors import CheckpointError

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def some_tensors() -> dict[str, torch.Tensor]:
    """Odd sizes of every width, a scalar, an empty one and a transposed one."""
    made = {str(dtype): torch.arange(7).to(dtype) for dtype in DTYPES}
    base = torch.arange(15.0).view(3, 5)
    return made | {"scalar": torch.tensor(2.5), "none": torch.empty(0, 3), "turned": base.t()}


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().flatten().view(torch.uint8).tolist()


def test_the_format_s_own_library_reads_every_dtype_and_shape(tmp_path):
    tensors, path = some_tensors(), tmp_path / "all.safetensors"
    write_images({path: image_of(tensors, {"format": "pt", "mine": "x"})})
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "mine": "x"}


def test_tensors_begin_at_multiples_of_their_width_in_the_file():
    image = image_of(some_tensors(), {})
    begin = image.memory.data_ptr()
    for name, view in image.views.items():
        if view.numel():
            assert (view.data_ptr() - begin) % view.itemsize == 0, name


def test_the_digest_is_that_of_the_file(tmp_path):
    paths = {tmp_path / "big": 3_000_001, tmp_path / "small": 3}
    images = {path: image_of({"w": torch.rand(size)}, {}) for path, size in paths.items()}
    digests = write_images(images)
    for path in paths:
        assert path.stat().st_size == images[path].size
        assert digests[path] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_kept_memory_is_used_again_for_the_same_layout_only():
    first = image_of({"a": torch.ones(5), "b": torch.ones(2)}, {})
    again = image_of({"a": torch.zeros(5), "b": torch.ones(2)}, {}, first)
    assert again is first
    assert again.views["a"].tolist() == [0.0] * 5
    assert image_of({"a": torch.zeros(5), "b": torch.ones(2)}, {"x": "y"}, first) is not first
    assert image_of({"a": torch.zeros(5), "c": torch.ones(2)}, {}, first) is not first


@pytest.mark.parametrize("refused_at", ["fcntl", "write"])
def test_file_systems_that_know_no_such_writing_get_the_plain_one(
    tmp_path, monkeypatch, refused_at
):
    """Some refuse the flag, some the first bytes."""
    direct = set()
    set_flags, write = module.fcntl.fcntl, os.write

    def fcntl(descriptor, command, *flags):
        if flags and flags[0] & os.O_DIRECT:
            if refused_at == "fcntl":
                raise OSError(errno.EINVAL, "Invalid argument")
            direct.add(descriptor)
        elif flags:
            direct.discard(descriptor)
        return set_flags(descriptor, command, *flags)

    def refusing(descriptor, piece):
        if descriptor in direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, piece)

    monkeypatch.setattr(module.fcntl, "fcntl", fcntl)
    monkeypatch.setattr(os, "write", refusing)
    path = tmp_path / "w"
    write_images({path: image_of({"w": torch.arange(3000.0)}, {})})
    assert load_file(path)["w"].tolist() == list(range(3000))


def test_pieces_that_are_cut_short_are_gone_on_with(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, piece: write(descriptor, piece[:5000]))
    path = tmp_path / "w"
    write_images({path: image_of({"w": torch.arange(30000.0)}, {})})
    assert torch.equal(load_file(path)["w"], torch.arange(30000.0))


def test_a_full_disk_is_named_with_the_file_and_the_remedy(tmp_path, monkeypatch):
    def full(descriptor, piece):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CheckpointError, match=r"w: cannot write \d+ bytes.*No space left.*free"):
        write_images({tmp_path / "w": image_of({"w": torch.ones(3)}, {})})


def test_an_invalid_argument_that_is_not_about_the_cache_is_raised(tmp_path, monkeypatch):
    def refusing(descriptor, piece):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "write", refusing)
    with pytest.raises(CheckpointError, match="Invalid argument"):
        write_images({Path(tmp_path / "w"): image_of({"w": torch.ones(3)}, {})})


def test_a_dtype_without_a_word_in_the_format_is_refused_by_name():
    with pytest.raises(CheckpointError, match=r"phase: dtype torch.complex64.*allowed: .*float32"):
        image_of({"phase": torch.zeros(2, dtype=torch.complex64)}, {})
