"""Saves that a thread finishes while the caller goes on."""

import os
import threading
from pathlib import Path

import fsspec
import pytest
import torch

import tandem.checkpoint.save as save_module
from tandem.checkpoint import (
    BackgroundWriter,
    latest,
    read_state,
    read_tensors,
    staging,
    write_state,
    write_tensors,
)
from tandem.errors import CheckpointError
from tests.checkpoint.test_save import names


@pytest.fixture
def writer():
    with BackgroundWriter() as made:
        yield made


class Gate:
    """Holds the thread back where the manifest would be written, until it is opened."""

    def __init__(self, monkeypatch):
        self.reached, self._opened = threading.Event(), threading.Event()
        original = save_module.write_manifest

        def held(*args, **kwargs):
            self.reached.set()
            assert self._opened.wait(60)
            original(*args, **kwargs)

        monkeypatch.setattr(save_module, "write_manifest", held)

    def open(self):
        self._opened.set()


@pytest.fixture
def gate(monkeypatch):
    made = Gate(monkeypatch)
    yield made
    made.open()


def fail_once(monkeypatch, error):
    """The next manifest cannot be written, those after it can."""
    original = save_module.write_manifest

    def write(*args, **kwargs):
        monkeypatch.setattr(save_module, "write_manifest", original)
        raise error

    monkeypatch.setattr(save_module, "write_manifest", write)


def save(run, step, writer, tensors, **options):
    with staging(run, step, keep=options.pop("keep", None), background=writer, **options) as stage:
        folder = stage.path / "policy"
        folder.mkdir()
        write_tensors(folder / "model.safetensors", tensors)
        write_state(folder / "engine.json", {"step": step})
        stage.manifest_extra["rows"] = rows = [step]
    rows.append("too late")


def save_and_fail(run):
    with BackgroundWriter() as writer:
        save(run, 1, writer, {"w": torch.ones(3)})
        raise KeyError("cause")


def test_what_is_saved_is_the_state_at_the_end_of_the_block(tmp_path, writer, gate):
    tensors = {"w": torch.arange(6.0).view(2, 3), "n": torch.tensor(7)}
    save(tmp_path, 1, writer, tensors)
    tensors["w"].zero_()
    tensors["n"].fill_(0)
    assert latest(tmp_path) is None
    gate.open()
    writer.wait()
    found = latest(tmp_path)
    assert found.extra == {"rows": [1]}
    assert read_state(found.path / "policy/engine.json") == {"step": 1}
    back = read_tensors(found.path / "policy/model.safetensors")
    assert back["w"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert back["n"].item() == 7


def test_the_caller_goes_on_while_the_files_are_written(tmp_path, writer, gate):
    save(tmp_path, 1, writer, {"w": torch.ones(3)})
    assert gate.reached.wait(60)
    assert writer.is_busy
    assert latest(tmp_path) is None
    gate.open()
    writer.wait()
    assert names(tmp_path) == ["step_1"]


def test_views_tied_and_transposed_tensors_come_back_as_they_were(tmp_path, writer):
    base = torch.arange(12.0).view(3, 4)
    tensors = {"whole": base, "again": base, "row": base[1], "turned": base.t()}
    save(tmp_path, 1, writer, tensors)
    writer.wait()
    back = read_tensors(tmp_path / "checkpoints/step_1/policy/model.safetensors")
    assert back["again"] is back["whole"]
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor), name


def test_buffers_are_kept_from_save_to_save_unless_a_shape_changes(tmp_path, writer, monkeypatch):
    made = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: made.append(a) or empty(*a, **k))
    save(tmp_path, 1, writer, {"a": torch.ones(5), "b": torch.ones(2)})
    save(tmp_path, 2, writer, {"a": torch.zeros(5), "b": torch.ones(2)})
    assert len(made) == 1
    save(tmp_path, 3, writer, {"a": torch.zeros(6), "b": torch.ones(2)})
    assert len(made) == 2
    writer.wait()
    sizes = [
        read_tensors(tmp_path / f"checkpoints/step_{step}/policy/model.safetensors")["a"].numel()
        for step in (1, 2, 3)
    ]
    assert sizes == [5, 5, 6]


def test_the_next_save_says_that_it_waits_and_waits(tmp_path, writer, gate, monkeypatch):
    save(tmp_path, 1, writer, {"w": torch.ones(3)})
    assert gate.reached.wait(60)
    landed_before = []

    def warning(message, *values):
        landed_before.append((message % values, names(tmp_path)))
        gate.open()

    monkeypatch.setattr(save_module.logger, "warning", warning)
    save(tmp_path, 2, writer, {"w": torch.zeros(3)})
    ((said, found),) = landed_before
    assert said.startswith("step_2 waits")
    assert "step_1" not in found
    assert "step_1" in names(tmp_path)
    writer.wait()
    assert names(tmp_path) == ["step_1", "step_2"]
    first = read_tensors(tmp_path / "checkpoints/step_1/policy/model.safetensors")
    assert first["w"].tolist() == [1.0, 1.0, 1.0]


def test_a_failed_write_raises_at_the_next_save_and_only_there(tmp_path, writer, monkeypatch):
    save(tmp_path, 1, writer, {"w": torch.ones(3)})
    writer.wait()
    fail_once(monkeypatch, OSError(28, "No space left on device"))
    save(tmp_path, 2, writer, {"w": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"step_2.*No space left"):
        save(tmp_path, 3, writer, {"w": torch.ones(3)})
    assert names(tmp_path) == ["step_1"]
    save(tmp_path, 4, writer, {"w": torch.ones(3)})
    writer.wait()
    assert names(tmp_path) == ["step_1", "step_4"]


def test_a_failed_write_raises_when_the_writer_ends(tmp_path, monkeypatch):
    fail_once(monkeypatch, OSError(5, "Input/output error"))
    with pytest.raises(CheckpointError, match="step_1"), BackgroundWriter() as writer:
        save(tmp_path, 1, writer, {"w": torch.ones(3)})
    assert names(tmp_path) == []


def test_a_failed_write_does_not_hide_why_the_run_ended(tmp_path, monkeypatch, caplog):
    fail_once(monkeypatch, OSError(5, "Input/output error"))
    with pytest.raises(KeyError, match="cause"):
        save_and_fail(tmp_path)
    assert "Input/output error" in caplog.text


def test_a_writer_that_ends_has_landed_its_checkpoint_whatever_ended_it(tmp_path):
    with pytest.raises(KeyError, match="cause"):
        save_and_fail(tmp_path)
    assert latest(tmp_path).step == 1


def test_an_error_in_the_block_leaves_nothing_and_starts_nothing(tmp_path, writer):
    with pytest.raises(KeyError), staging(tmp_path, 1, keep=None, background=writer) as stage:
        write_tensors(stage.path / "model.safetensors", {"w": {}["missing"]})
    assert not writer.is_busy
    assert names(tmp_path) == []
    write_tensors(tmp_path / "outside.safetensors", {"w": torch.ones(3)})
    assert (tmp_path / "outside.safetensors").is_file()


def test_state_that_cannot_be_stored_is_refused_in_the_block(tmp_path, writer):
    with (
        pytest.raises(CheckpointError, match="manifest_extra"),
        staging(tmp_path, 1, keep=None, background=writer) as stage,
    ):
        stage.manifest_extra["object"] = object()
    assert names(tmp_path) == []


def test_retention_and_upload_follow_in_the_thread(tmp_path, writer):
    store = fsspec.filesystem("memory")
    store.store.clear()
    for step in (1, 2, 3):
        url = "memory://bucket/run"
        save(tmp_path, step, writer, {"w": torch.ones(3)}, keep=2, upload_url=url)
    writer.wait()
    assert names(tmp_path) == ["step_2", "step_3"]
    assert sorted(p.rsplit("/", 1)[1] for p in store.ls("/bucket/run", detail=False)) == [
        "step_1",
        "step_2",
        "step_3",
    ]
    store.store.clear()


def test_a_failed_upload_raises_and_leaves_the_local_checkpoint(tmp_path, writer):
    save(tmp_path, 1, writer, {"w": torch.ones(3)}, upload_url="nosuch://bucket")
    with pytest.raises(CheckpointError, match="nosuch"):
        writer.wait()
    assert latest(tmp_path).step == 1


def test_a_relative_run_directory_is_deferred_too(tmp_path, writer, gate, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tensor = torch.ones(3)
    save(Path("run"), 1, writer, {"w": tensor})
    tensor.zero_()
    assert gate.reached.wait(60)
    gate.open()
    writer.wait()
    back = read_tensors("run/checkpoints/step_1/policy/model.safetensors")
    assert back["w"].sum().item() == 3.0
    assert os.listdir("run/checkpoints") == ["step_1"]
