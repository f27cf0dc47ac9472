"""Copies of checkpoints on a real S3 server on the loopback interface."""

from __future__ import annotations

import pytest
import torch

from tandem.checkpoint import BackgroundWriter, download, staging, upload, verify, write_tensors
from tandem.errors import CheckpointError

pytestmark = [
    # of the server's own libraries
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
pytest.importorskip("s3fs", reason="needs s3fs")
server = pytest.importorskip("moto.server", reason="needs moto[server]")


@pytest.fixture(scope="module")
def endpoint():
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def store(endpoint, monkeypatch):
    """The file system of an empty bucket, as the environment of a user describes it."""
    import s3fs

    settings = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    made = s3fs.S3FileSystem()
    if made.exists("bucket"):
        made.rm("bucket", recursive=True)
    made.mkdir("bucket")
    return made


def save(run, step, tensors, **options):
    with staging(run, step, keep=None, **options) as stage:
        (stage.path / "policy").mkdir()
        write_tensors(stage.path / "policy" / "model.safetensors", tensors)
        stage.manifest_extra["step"] = step
    return run / "checkpoints" / f"step_{step}"


def test_a_copy_on_s3_comes_back_equal_and_verified(store, tmp_path):
    # Larger than one part, so that it goes up in several.
    tensors = {"w": torch.randn(15 << 20), "n": torch.arange(5)}
    with BackgroundWriter() as writer:
        url = "s3://bucket/runs/a"
        local = save(tmp_path, 4, tensors, upload_url=url, background=writer)
    assert sorted(store.find("bucket")) == [
        "bucket/runs/a/step_4/manifest.json",
        "bucket/runs/a/step_4/policy/model.safetensors",
    ]
    got = download("s3://bucket/runs/a/step_4", tmp_path / "copy")
    assert got.extra == {"step": 4}
    assert verify(got.path).files == verify(local).files


def test_an_upload_cut_short_is_no_checkpoint_and_can_be_repeated(store, tmp_path):
    local = save(tmp_path, 4, {"w": torch.ones(5)})
    store.put_file(
        str(local / "policy" / "model.safetensors"), "bucket/step_4/policy/model.safetensors"
    )
    with pytest.raises(CheckpointError, match="download of s3://bucket/step_4 failed"):
        download("s3://bucket/step_4", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    upload(local, "s3://bucket/step_4")
    assert download("s3://bucket/step_4", tmp_path / "copy").step == 4


def test_another_checkpoint_on_s3_is_moved_away_whole(store, tmp_path):
    first, second = (save(tmp_path / str(i), 4, {"w": torch.full((5,), i)}) for i in (1, 2))
    for checkpoint in (first, first, second):
        upload(checkpoint, "s3://bucket/step_4")
    assert download("s3://bucket/step_4", tmp_path / "new").files == verify(second).files
    old = download("s3://bucket/step_4.superseded-1", tmp_path / "old")
    assert old.files == verify(first).files
