import fsspec
import pytest

from tandem.checkpoint import download, latest, staging, upload, verify, write_state
from tandem.errors import CheckpointError


@pytest.fixture
def store():
    store = fsspec.filesystem("memory")
    store.store.clear()
    store.pseudo_dirs[:] = [""]
    yield store
    store.store.clear()
    store.pseudo_dirs[:] = [""]


def save(run, step, value, url=None):
    with staging(run, step, keep=None, upload_url=url) as stage:
        (stage.path / "policy/deep").mkdir(parents=True)
        write_state(stage.path / "policy/deep/a.json", value)
        stage.manifest_extra["value"] = value
    return run / "checkpoints" / f"step_{step}"


def test_copy_comes_back_equal_and_verified(tmp_path, store):
    local = save(tmp_path / "run", 4, 0.1, "memory://bucket/run")
    got = download("memory://bucket/run/step_4", tmp_path / "other/checkpoints/step_4")
    assert got.extra == {"value": 0.1}
    assert verify(got.path).files == verify(local).files
    assert latest(tmp_path / "other").step == 4


def test_manifest_is_uploaded_last(tmp_path, store, monkeypatch):
    local = save(tmp_path, 4, 1)
    put_file = type(store).put_file

    def put(self, path, remote, **kwargs):
        assert not store.exists("/b/step_4/manifest.json")
        put_file(self, path, remote, **kwargs)

    monkeypatch.setattr(type(store), "put_file", put)
    upload(local, "memory://b/step_4")
    assert store.exists("/b/step_4/manifest.json")


def test_upload_cut_short_is_no_checkpoint_and_can_be_repeated(tmp_path, store, monkeypatch):
    local = save(tmp_path, 4, 1)
    with monkeypatch.context() as patch:

        def fail(*args, **kwargs):
            raise OSError("connection lost")

        patch.setattr(type(store), "pipe_file", fail)
        with pytest.raises(CheckpointError, match=r"memory://b/step_4.*connection lost.*complete"):
            upload(local, "memory://b/step_4")
    with pytest.raises(CheckpointError, match="memory://b/step_4"):
        download("memory://b/step_4", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    upload(local, "memory://b/step_4")
    assert download("memory://b/step_4", tmp_path / "copy").extra == {"value": 1}


def test_damaged_copy_is_refused_and_leaves_nothing(tmp_path, store):
    local = save(tmp_path, 4, 1)
    upload(local, "memory://b/step_4")
    store.pipe_file("/b/step_4/policy/deep/a.json", b"2")
    with pytest.raises(CheckpointError, match=r"a.json is damaged"):
        download("memory://b/step_4", tmp_path / "copies" / "step_4")
    assert list((tmp_path / "copies").iterdir()) == []


def test_existing_target_is_used_if_equal_and_refused_if_not(tmp_path, store):
    upload(save(tmp_path / "a", 4, 1), "memory://b/step_4")
    assert download("memory://b/step_4", tmp_path / "a/checkpoints/step_4").step == 4
    other = save(tmp_path / "other", 4, 2)
    with pytest.raises(CheckpointError, match="choose another path"):
        download("memory://b/step_4", other)
    assert verify(other).extra == {"value": 2}


def test_repeated_upload_does_nothing_and_another_content_moves_the_old_away(tmp_path, store):
    first, second = save(tmp_path / "a", 4, 1), save(tmp_path / "b", 4, 2)
    upload(first, "memory://b/step_4")
    upload(first, "memory://b/step_4")
    assert [p for p in store.find("/b") if "superseded" in p] == []
    upload(second, "memory://b/step_4")
    assert download("memory://b/step_4", tmp_path / "new").extra == {"value": 2}
    assert download("memory://b/step_4.superseded-1", tmp_path / "old").extra == {"value": 1}


def test_unknown_store_is_reported_and_the_local_checkpoint_stays(tmp_path):
    with pytest.raises(CheckpointError, match="nosuch"):
        save(tmp_path, 4, 1, "nosuch://bucket")
    assert latest(tmp_path).step == 4
