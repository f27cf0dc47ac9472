import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tandem.checkpoint.save as save_module
from tandem.checkpoint import (
    latest,
    read_tensors,
    staging,
    supersede_newer,
    verify,
    write_state,
    write_tensors,
)
from tandem.errors import CheckpointError


def save(run: Path, step: int, *, keep=None, value: float | None = None, extra=None) -> None:
    with staging(run, step, keep=keep) as stage:
        (stage.path / "policy").mkdir()
        fill = float(step) if value is None else value
        write_tensors(stage.path / "policy" / "model.safetensors", {"w": torch.full((50,), fill)})
        write_state(stage.path / "trainer.json", {"step": step})
        stage.manifest_extra.update(extra or {})


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def flip_bit(path: Path, offset: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_saved_checkpoint_is_found_with_its_files_and_extra(tmp_path):
    extra = {"open_episodes": [3, 1 << 41], "position": (0, 7), "ema": 0.1}
    save(tmp_path, 5, extra=extra)
    found = latest(tmp_path)
    assert (found.step, found.path) == (5, tmp_path / "checkpoints" / "step_5")
    assert found.extra == extra
    assert {entry.name for entry in found.files} == {"policy/model.safetensors", "trainer.json"}
    assert read_tensors(found.path / "policy/model.safetensors")["w"][0] == 5.0


def test_run_without_checkpoints_has_none(tmp_path):
    assert latest(tmp_path) is None


def test_nothing_is_visible_before_the_block_ends(tmp_path):
    with staging(tmp_path, 1, keep=None) as stage:
        write_state(stage.path / "a.json", 1)
        assert latest(tmp_path) is None
        assert stage.path.is_dir()
    assert latest(tmp_path).step == 1


def test_exception_removes_the_staging_and_passes_through(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(KeyError, match="missing"), staging(tmp_path, 2, keep=1) as stage:
        (stage.path / "a.json").write_text({}["missing"])
    assert names(tmp_path) == ["step_1"]
    assert latest(tmp_path).step == 1


def test_full_disk_leaves_the_previous_checkpoint_and_names_path_and_remedy(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(save_module, "write_manifest", full)
    with pytest.raises(CheckpointError, match=r"step_2.*No space left.*Free disk space"):
        save(tmp_path, 2, keep=1)
    assert names(tmp_path) == ["step_1"]
    assert latest(tmp_path).step == 1


def test_really_full_file_system_is_reported(tmp_path):
    run = tmp_path / "tiny"
    run.mkdir()
    mounted = os.geteuid() == 0 and not subprocess.call(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(run)], stderr=subprocess.DEVNULL
    )
    if not mounted:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        save(run, 1)
        with pytest.raises(CheckpointError, match=r"disk space"), staging(run, 2, keep=1) as stage:
            write_tensors(stage.path / "big", {"w": torch.zeros(1 << 20)})
        with pytest.raises(CheckpointError, match=r"disk space"), staging(run, 2, keep=1) as stage:
            (stage.path / "big").write_bytes(bytes(1 << 20))
        assert names(run) == ["step_1"]
        assert latest(run).step == 1
        save(run, 2, keep=1)
        assert names(run) == ["step_2"]
    finally:
        subprocess.check_call(["umount", str(run)])


def test_valid_checkpoint_is_never_overwritten(tmp_path):
    save(tmp_path, 3, value=1.0)
    with pytest.raises(CheckpointError, match=r"step_3.*never overwritten"):
        save(tmp_path, 3, value=2.0)
    assert read_tensors(latest(tmp_path).path / "policy/model.safetensors")["w"][0] == 1.0


def test_damaged_target_is_quarantined_under_a_free_number(tmp_path):
    for _ in range(2):
        save(tmp_path, 3)
        flip_bit(tmp_path / "checkpoints/step_3/policy/model.safetensors")
    save(tmp_path, 3)
    assert names(tmp_path) == ["step_3", "step_3.invalid-1", "step_3.invalid-2"]
    assert latest(tmp_path).step == 3


def test_target_that_became_valid_meanwhile_is_not_overwritten(tmp_path):
    with pytest.raises(CheckpointError, match="never overwritten"), staging(tmp_path, 3, keep=None):
        save(tmp_path, 3)
    assert names(tmp_path) == ["step_3"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: flip_bit(d / "policy/model.safetensors"), "model.safetensors is damaged"),
        (lambda d: os.truncate(d / "policy/model.safetensors", 10), "has 10 bytes"),
        (lambda d: (d / "trainer.json").unlink(), "trainer.json is missing"),
        (lambda d: (d / "manifest.json").unlink(), "never finished"),
        (lambda d: os.truncate(d / "manifest.json", 30), "manifest.json is damaged"),
        (
            lambda d: (d / "manifest.json").write_text(
                (d / "manifest.json").read_text().replace('"marker": 77', '"marker": 78')
            ),
            "manifest.json is damaged",
        ),
    ],
    ids=["bit", "truncated", "missing", "no manifest", "cut manifest", "edited manifest"],
)
def test_damage_is_detected_and_the_one_before_is_taken(tmp_path, caplog, damage, words):
    save(tmp_path, 10)
    save(tmp_path, 20, extra={"marker": 77})
    damage(tmp_path / "checkpoints/step_20")
    with pytest.raises(CheckpointError, match=words):
        verify(tmp_path / "checkpoints/step_20")
    with caplog.at_level(logging.WARNING):
        assert latest(tmp_path).step == 10
    assert len(caplog.records) == 1
    assert "step_20" in caplog.text


def test_damage_that_keeps_size_and_time_is_still_found_by_latest(tmp_path):
    save(tmp_path, 10)
    save(tmp_path, 20)
    file = tmp_path / "checkpoints/step_20/policy/model.safetensors"
    stat = file.stat()
    flip_bit(file)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert latest(tmp_path).step == 10


def test_only_damaged_checkpoints_are_an_error_not_a_fresh_start(tmp_path):
    for step in (1, 2):
        save(tmp_path, step)
        flip_bit(tmp_path / f"checkpoints/step_{step}/trainer.json")
    with pytest.raises(CheckpointError, match=r"step_2.*step_1"):
        latest(tmp_path)


def test_manifest_that_points_outside_is_refused(tmp_path):
    save(tmp_path, 1)
    directory = tmp_path / "checkpoints/step_1"
    from tandem.checkpoint import manifest

    record = manifest.json.loads((directory / "manifest.json").read_text())
    record["files"][0]["name"] = "../../secret"
    del record["sha256"]
    record["sha256"] = manifest._digest(record)
    (directory / "manifest.json").write_text(manifest.json.dumps(record))
    with pytest.raises(CheckpointError, match="leads out"):
        verify(directory)


def test_link_in_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="link"), staging(tmp_path, 1, keep=None) as stage:
        (stage.path / "link").symlink_to("/etc/hostname")
    assert names(tmp_path) == []


def test_retention_counts_what_earlier_processes_wrote(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    save(tmp_path, 10, keep=2)
    assert names(tmp_path) == ["step_10", "step_3"]


def test_old_checkpoint_goes_only_after_the_new_one_has_landed(tmp_path, monkeypatch):
    save(tmp_path, 1, keep=1)
    seen = []
    retain = save_module.retain

    def spying(run_dir, keep):
        seen.append(names(tmp_path))
        retain(run_dir, keep)

    monkeypatch.setattr(save_module, "retain", spying)
    save(tmp_path, 2, keep=1)
    assert seen == [["step_1", "step_2"]]
    assert names(tmp_path) == ["step_2"]


def test_retention_does_not_count_damaged_ones(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    flip_bit(tmp_path / "checkpoints/step_2/policy/model.safetensors")
    save(tmp_path, 3, keep=2)
    assert names(tmp_path) == ["step_1", "step_2", "step_3"]


def test_newer_ones_are_superseded_and_out_of_the_way(tmp_path):
    for step in (0, 5, 10):
        save(tmp_path, step)
    supersede_newer(tmp_path, 0)
    assert latest(tmp_path).step == 0
    save(tmp_path, 5)
    renamed = supersede_newer(tmp_path, 0)
    assert [path.name for path in renamed] == ["step_5.superseded-1"]
    expected = ["step_0", "step_10.superseded", "step_5.superseded", "step_5.superseded-1"]
    assert names(tmp_path) == expected


@pytest.mark.parametrize(("step", "keep"), [(-1, None), (0, 0)])
def test_impossible_numbers_are_refused(tmp_path, step, keep):
    with pytest.raises(CheckpointError, match="allowed"), staging(tmp_path, step, keep=keep):
        pass


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
import tandem.checkpoint.directory as directory
import tandem.checkpoint.save as module
from tandem.checkpoint import write_tensors

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

rename = Path.rename
def rename_then_die(path, target):
    rename(path, target)
    die()

def save_and_die(run, moment, background):
    if moment == "before_manifest":
        module.write_manifest = die
    elif moment == "before_rename":
        module._land = die
    elif moment == "after_rename":
        Path.rename = rename_then_die
    elif moment == "before_retention":
        module.retain = die
    elif moment == "in_removal":
        directory.shutil.rmtree = lambda path, **kw: die() if ".removing" in str(path) else None
    with module.staging(run, 20, keep=1, background=background) as stage:
        write_tensors(stage.path / "model.safetensors", {"w": torch.ones(10)})
        if moment == "after_model_file":
            die()
    if background:
        background.wait()

# One child a moment: torch is imported once.
for name in sys.argv[2:]:
    child = os.fork()
    if not child:
        writer, _, moment = name.partition("-")
        background = module.BackgroundWriter() if writer == "thread" else None
        save_and_die(Path(sys.argv[1], name), moment, background)
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL, name
"""
STEP_AFTER = {
    f"{writer}-{moment}": step
    for writer in ("caller", "thread")
    for moment, step in {
        "after_model_file": 10,
        "before_manifest": 10,
        "before_rename": 10,
        "after_rename": 20,
        "before_retention": 20,
        "in_removal": 20,
    }.items()
}
"""By who wrote the checkpoint and the moment of the kill."""


@pytest.fixture(scope="module")
def killed_runs(tmp_path_factory):
    """For each moment a run with step 10, whose process was killed then while saving step 20."""
    root = tmp_path_factory.mktemp("killed")
    for moment in STEP_AFTER:
        save(root / moment, 10)
    subprocess.run([sys.executable, "-c", KILLED, str(root), *STEP_AFTER], check=True, timeout=120)
    return root


@pytest.mark.parametrize(("moment", "step"), STEP_AFTER.items())
def test_killed_process_leaves_a_run_that_resumes(killed_runs, caplog, moment, step):
    run = killed_runs / moment
    with caplog.at_level(logging.WARNING):
        assert latest(run).step == step
    assert len(caplog.records) == (1 if step == 10 else 0)
    assert step == 20 or "step_20" in caplog.text
    assert all(name.startswith("step_") for name in names(run))
    save(run, 30, keep=1)
    assert names(run) == ["step_30"]


def test_staging_of_a_living_process_is_not_touched(tmp_path):
    with staging(tmp_path, 1, keep=None) as stage:
        write_state(stage.path / "a.json", 1)
        save(tmp_path, 2)
        latest(tmp_path)
        assert (stage.path / "a.json").is_file()
    assert names(tmp_path) == ["step_1", "step_2"]
