"""One suite over every transport, then what only files have."""

import json
import os
import signal
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tandem.errors import ConfigError, WeightSyncError
from tandem.types import ParamSpec, WeightUpdateMeta
from tandem.weights import Published, expect, open_published, publish, release
from tandem.weights.transports import mapped, shared_memory

KINDS = ("inprocess", "shared_memory", "disk")
FILE_KINDS = KINDS[1:]
TIED = torch.randn(4, 3)
TENSORS = {
    "embed": TIED,
    "head": TIED,
    "transposed": torch.arange(10.0).view(2, 5).t(),
    "strided": torch.arange(20.0)[1::3],
    "half": torch.tensor([1.5], dtype=torch.float16),
    "flag": torch.tensor(True),
    "count": torch.tensor([2**62 + 1]),
    "empty": torch.empty(0, 4),
    "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
}


def specs_of(tensors):
    return [
        ParamSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch."))
        for name, t in tensors.items()
    ]


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    """A root of its own, so that no other process of this machine is seen or disturbed."""
    monkeypatch.setattr(shared_memory, "shared_root", lambda: tmp_path)
    yield tmp_path
    release("test")


def send(kind, root, version=1, tensors=TENSORS, **kwargs) -> Published:
    meta = WeightUpdateMeta(
        type=kind, version=version, channel="test", path=str(root / "disk"), **kwargs
    )
    future = expect(meta)
    publish(meta, specs_of(tensors), tensors.items())
    return future.result(timeout=0)


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_arrives_with_shape_dtype_and_digest(kind, root):
    published = send(kind, root)
    assert [entry.name for entry in published.manifest.tensors] == list(TENSORS)
    with open_published(published) as got:
        assert list(got) == list(TENSORS)
        for name, tensor in TENSORS.items():
            assert (got[name].shape, got[name].dtype) == (tensor.shape, tensor.dtype)
            assert torch.equal(raw(got[name]), raw(tensor)), name
    for entry in published.manifest.tensors:
        assert entry.sha256 == sha256(raw(TENSORS[entry.name]).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("kind", KINDS)
def test_floats_are_cast_at_the_sender_and_integers_are_not(kind, root):
    published = send(kind, root, dtype="bfloat16")
    with open_published(published) as got:
        assert got["count"].item() == 2**62 + 1
        assert got["flag"].dtype == torch.bool
        for name in ("embed", "head", "transposed", "half", "special"):
            assert torch.equal(raw(got[name]), raw(TENSORS[name].bfloat16())), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_may_reuse_one_tensor_for_every_name(kind, root):
    scratch = torch.empty(3)
    meta = WeightUpdateMeta(type=kind, version=1, channel="test", path=str(root))
    publish(
        meta,
        [ParamSpec(name, (3,), "float32") for name in "abc"],
        ((name, scratch.fill_(value)) for value, name in enumerate("abc")),
    )
    with open_published(expect(meta).result(timeout=0)) as got:
        assert [tensor[0].item() for tensor in got.values()] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sent_is_a_copy(kind, root):
    tensor = torch.ones(3)
    published = send(kind, root, tensors={"a": tensor})
    tensor.fill_(7.0)
    with open_published(published) as got:
        assert got["a"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", KINDS)
def test_version_being_read_stays_whole_while_newer_ones_are_written(kind, root):
    first = send(kind, root, 1, {"a": torch.full((1000,), 1.0)})
    with open_published(first) as got:
        for version in range(2, 7):
            newer = send(kind, root, version, {"a": torch.full((1000,), float(version))})
            assert torch.equal(got["a"], torch.ones(1000))
            with open_published(newer) as got_newer:
                assert got_newer["a"][0] == version


@pytest.mark.parametrize("kind", KINDS)
def test_previous_version_can_still_be_opened_and_the_one_before_cannot(kind, root):
    published = [send(kind, root, v, {"a": torch.full((9,), float(v))}) for v in (1, 2, 3)]
    with open_published(published[1]) as got:
        assert got["a"][0] == 2.0
    with pytest.raises(WeightSyncError, match="newer"), open_published(published[0]):
        pass


@pytest.mark.parametrize("kind", KINDS)
def test_failed_write_leaves_the_newest_version_readable(kind, root):
    published = send(kind, root, 1, {"a": torch.ones(5)})

    def broken():
        yield "a", torch.zeros(5)
        raise RuntimeError("died")

    meta = WeightUpdateMeta(type=kind, version=2, channel="test", path=str(root / "disk"))
    for _ in range(3):
        with pytest.raises(WeightSyncError, match="died"):
            publish(meta, specs_of({"a": torch.ones(5), "b": TIED}), broken())
    with pytest.raises(WeightSyncError, match="stream"):
        publish(meta, specs_of({"a": torch.ones(5)}), iter(()))
    with open_published(published) as got:
        assert torch.equal(got["a"], torch.ones(5))
    assert not [p for p in root.rglob("*") if "partial" in p.name]


@pytest.mark.parametrize("kind", KINDS)
def test_model_may_change_its_size_between_versions(kind, root):
    for version, size in enumerate((10, 5000, 3, 20000, 1)):
        published = send(kind, root, version, {"a": torch.arange(size)})
        with open_published(published) as got:
            assert torch.equal(got["a"], torch.arange(size))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_send_is_a_version_too(kind, root):
    with open_published(send(kind, root, tensors={})) as got:
        assert got == {}


def test_flipped_bit_in_memory_names_the_tensor(root):
    published = send("inprocess", root)
    entry = published.manifest.tensors[2]
    published.location.buffer.data[entry.offset] ^= 1
    with pytest.raises(WeightSyncError, match="sha256 differs for transposed;"):  # noqa: SIM117
        with open_published(published):
            pass


@pytest.mark.parametrize("kind", FILE_KINDS)
def test_flipped_bit_in_the_file_names_the_tensor(kind, root):
    published = send(kind, root)
    entry = published.manifest.tensors[3]
    with Path(published.location["path"]).open("r+b") as file:
        file.seek(published.location["data_start"] + entry.end - 1)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(WeightSyncError, match="sha256 differs for strided;"):  # noqa: SIM117
        with open_published(published):
            pass


@pytest.mark.parametrize("kind", FILE_KINDS)
def test_truncated_file_is_refused_and_does_not_crash(kind, root):
    published = send(kind, root)
    os.truncate(published.location["path"], 10)
    with pytest.raises(WeightSyncError, match="has 10 bytes"), open_published(published):
        pass


@pytest.mark.parametrize("kind", FILE_KINDS)
def test_reader_that_writes_changes_nothing_for_others(kind, root):
    published = send(kind, root)
    with open_published(published) as got:
        got["embed"].zero_()
    with open_published(published) as got:
        assert torch.equal(got["embed"], TIED)


def test_manifest_and_file_locations_travel_as_json_and_memory_does_not(root):
    for kind in FILE_KINDS:
        published = send(kind, root)
        assert Published.from_json(json.loads(json.dumps(published.to_json()))) == published
    with pytest.raises(WeightSyncError, match="cannot cross processes"):
        send("inprocess", root).to_json()


READER = """
import json, sys
from tandem.weights import Published, open_published
for message in sys.argv[1:]:
    with open_published(Published.from_json(json.loads(message))) as got:
        print(got["transposed"].sum().item(), got["count"].item())
"""


def test_another_process_reads_every_kind_of_file(root):
    messages = [json.dumps(send(kind, root).to_json()) for kind in FILE_KINDS]
    command = [sys.executable, "-c", READER, *messages]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert output.split() == ["45.0", str(2**62 + 1)] * len(FILE_KINDS)


def test_hundred_updates_hold_two_files_and_release_leaves_none(root):
    for version in range(100):
        send("shared_memory", root, version, {"a": torch.full((10,), float(version))})
        assert len([p for p in root.rglob("*") if p.is_file()]) <= 2
    release("test")
    assert list(root.iterdir()) == []


def test_file_nobody_reads_is_used_again(root):
    paths = [send("shared_memory", root, v, {"a": torch.ones(4)}).location["path"] for v in (1, 2)]
    inodes = {os.stat(path).st_ino for path in paths}
    third = send("shared_memory", root, 3, {"a": torch.ones(4)}).location["path"]
    assert os.stat(third).st_ino in inodes


WRITER = """
import os, signal, sys
from pathlib import Path
import torch
from tandem.types import ParamSpec, WeightUpdateMeta
from tandem.weights import publish
from tandem.weights.transports import shared_memory
shared_memory.shared_root = lambda: Path(sys.argv[1])
publish(WeightUpdateMeta("shared_memory", 1), [ParamSpec("a", (2,), "float32")],
        [("a", torch.ones(2))])
if sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_interpreter_exit_removes_everything(root):
    subprocess.run([sys.executable, "-c", WRITER, str(root), "exit"], check=True, timeout=60)
    assert list(root.iterdir()) == []


def test_leftover_of_a_killed_process_goes_when_the_next_sender_starts(root):
    command = [sys.executable, "-c", WRITER, str(root), "kill"]
    process = subprocess.Popen(command)
    assert process.wait(timeout=60) == -signal.SIGKILL
    (leftover,) = root.iterdir()
    assert f"-{process.pid}-" in leftover.name
    send("shared_memory", root)
    (own,) = root.iterdir()
    assert f"-{os.getpid()}-" in own.name


def test_directory_of_a_living_sender_is_left_alone(root):
    published = send("shared_memory", root)
    other = shared_memory.SharedMemorySender("other")
    meta = WeightUpdateMeta(type="shared_memory", version=1)
    other.write(meta, specs_of({"a": TIED}), [("a", TIED)])
    assert len(list(root.iterdir())) == 2
    with open_published(published) as got:
        assert torch.equal(got["embed"], TIED)
    other.release()


def test_full_device_is_an_error_not_a_crash(root, monkeypatch):
    monkeypatch.setattr(mapped, "_reserve", lambda file, size: os.posix_fallocate(file, 0, 1 << 60))
    with pytest.raises(WeightSyncError, match=r"shared memory: cannot write .*transport=disk"):
        send("shared_memory", root)
    assert not [p for p in root.rglob("*") if p.is_file()]


def test_disk_file_is_plain_safetensors(root):
    published = send("disk", root, 4)
    loaded = load_file(root / "disk" / "v4" / "model.safetensors")
    assert set(loaded) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(raw(loaded[name]), raw(tensor)), name
    assert published.location["path"] == str(root / "disk" / "v4" / "model.safetensors")


def test_disk_keeps_two_versions_while_running_and_the_newest_after(root):
    for version in range(5):
        send("disk", root, version)
    assert sorted(p.name for p in (root / "disk").iterdir()) == ["v3", "v4"]
    release("test")
    assert [p.name for p in (root / "disk").iterdir()] == ["v4"]


def test_disk_replaces_a_version_of_an_earlier_start_but_nothing_else(root):
    send("disk", root, 4, {"a": torch.ones(2)})
    release("test")
    with open_published(send("disk", root, 4, {"a": torch.zeros(2)})) as got:
        assert got["a"].tolist() == [0.0, 0.0]
    (root / "disk" / "v5").mkdir()
    (root / "disk" / "v5" / "mine.txt").touch()
    with pytest.raises(WeightSyncError, match="not a published version"):
        send("disk", root, 5)
    assert (root / "disk" / "v5" / "mine.txt").exists()


def test_disk_needs_a_path():
    meta = WeightUpdateMeta(type="disk", version=1, channel="test")
    with pytest.raises(ConfigError, match=r"WeightUpdateMeta.path: got None"):
        publish(meta, [], [])
