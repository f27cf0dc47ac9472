"""Replay of recorded runs, and runs that stand still."""

from __future__ import annotations

import json
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.errors import ConfigError, ReplayDiverged, StallError, StoreError
from tandem.observe.status import read_status
from tandem.rollout.encoding import pack_rows, unpack_rows
from tandem.rollout.rows import check_rows
from tandem.store import STORE_FILE
from tandem.trainers import run_replay, run_rl
from tandem.trainers.run import StopSignal
from tests.runs.conftest import TINY, Bed, Problems, metrics, rl_settings

OPTIONS = (
    "rollout.max_staleness=2",
    "rollout.batch_size=2",
    "checkpoint.every=2",
    "checkpoint.keep=null",
    "checkpoint.export_model=false",
    "eval.data=null",
    "inference.backend=scripted",
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, problems: Problems) -> Bed:
    """An asynchronous run of six steps; the generator's completions are random texts."""
    made = Bed(tmp_path_factory.mktemp("recorded"), rl_settings(problems, {"tiny": TINY}))
    run_rl(made.config(*OPTIONS, "steps=6"))
    return made


@pytest.fixture
def copy(recorded: Bed, tmp_path: Path) -> Path:
    """A copy of the run that a test may change."""
    return Path(shutil.copytree(recorded.run_dir(), tmp_path / "run"))


def test_an_asynchronous_run_is_replayed_bit_for_bit(recorded: Bed) -> None:
    seen: list[int] = []
    report = run_replay(recorded.run_dir(), on_step=seen.append)
    assert (report.first, report.last) == (1, 6)
    assert seen == [1, 2, 3, 4, 5, 6]
    assert report.num_values > 6 * 10


def test_a_replay_can_begin_at_a_checkpoint(recorded: Bed) -> None:
    report = run_replay(recorded.run_dir(), from_step=4)
    assert (report.first, report.last) == (5, 6)


def test_the_embedded_engine_is_replayed_too(tmp_path: Path, problems: Problems) -> None:
    bed = Bed(tmp_path, rl_settings(problems, {"tiny": TINY}))
    run_rl(bed.config(*OPTIONS, "inference.backend=embedded", "steps=4", "algorithm.kl_coef=0.1"))
    assert run_replay(bed.run_dir()).last == 4


def edit_event(run_dir: Path, version: int, **changes: Any) -> None:
    db = sqlite3.connect(run_dir / STORE_FILE)
    where = "kind = 'trained' AND version = ?"
    (text,) = db.execute(f"SELECT detail FROM events WHERE {where}", (version,)).fetchone()
    detail = json.loads(text)
    detail["metrics"] |= changes
    db.execute(f"UPDATE events SET detail = ? WHERE {where}", (json.dumps(detail), version))
    db.commit()
    db.close()


def test_the_first_divergence_is_named_with_both_values(copy: Path) -> None:
    loss = metrics(copy)[3]["actor/grad_norm"]
    edit_event(copy, 4, **{"actor/grad_norm": 1.5})
    edit_event(copy, 5, **{"actor/grad_norm": 2.5})
    with pytest.raises(ReplayDiverged, match=r"step 4: actor/grad_norm: recorded 1\.5") as caught:
        run_replay(copy)
    assert f"replayed {loss!r}" in str(caught.value)


def test_a_changed_reward_in_the_store_diverges_at_its_step(copy: Path) -> None:
    db = sqlite3.connect(copy / STORE_FILE)
    key, data = db.execute(
        "SELECT key, rows FROM contents JOIN episodes USING (key) WHERE step = 3"
    ).fetchone()
    rows = unpack_rows(data, episode_id=0, attempt=0)
    rows["rewards"] = rows["rewards"] + torch.tensor([1.0, 0.0, 0.0, 0.0])
    packed = pack_rows(check_rows(rows, 0, 0)[0])
    db.execute("UPDATE contents SET rows = ? WHERE key = ?", (packed, key))
    db.commit()
    db.close()
    with pytest.raises(ReplayDiverged, match=r"step 3: .*recorded"):
        run_replay(copy)


def test_what_a_resume_abandoned_is_not_part_of_the_replay(copy: Path, recorded: Bed) -> None:
    """Back to step 2, as if the newer checkpoints had been damaged; steps 3 to 6 are done again."""
    for step in (4, 6):
        shutil.rmtree(copy / "checkpoints" / f"step_{step}")
    moved = Bed(copy.parent, recorded.settings)
    run_rl(moved.config(*OPTIONS, "steps=6"), resume=True)
    db = sqlite3.connect(copy / STORE_FILE)
    (num_batches,) = db.execute("SELECT count(*) FROM events WHERE kind = 'batch'").fetchone()
    db.close()
    assert num_batches == 6 + 4
    report = run_replay(copy)
    assert (report.first, report.last) == (1, 6)


def test_a_prolonged_run_is_replayed_up_to_its_prolongation_and_from_there(
    copy: Path, recorded: Bed
) -> None:
    moved = Bed(copy.parent, recorded.settings)
    run_rl(moved.config(*OPTIONS, "steps=8"), resume=True)
    assert run_replay(copy).last == 6
    report = run_replay(copy, from_step=6)
    assert (report.first, report.last) == (7, 8)


def test_after_a_resume_the_trainers_weights_serve_before_the_first_rollout(
    tmp_path: Path, problems: Problems
) -> None:
    bed = Bed(tmp_path, rl_settings(problems, {"tiny": TINY}))
    fast = ("train.lr=0.05", "checkpoint.export_model=false", "eval.data=null")
    run_rl(bed.config(*fast, "steps=3"))
    run_rl(bed.config(*fast, "steps=5"), resume=True)
    gaps = [row["mismatch/same_version_max"] for row in metrics(bed.run_dir()) if row["step"] > 3]
    assert len(gaps) == 2
    assert max(gaps) < 1e-4
    db = sqlite3.connect(bed.run_dir() / STORE_FILE)
    found = db.execute(
        "SELECT incarnation, min(started_version), max(started_version) FROM episodes "
        "GROUP BY incarnation ORDER BY min(key)"
    ).fetchall()
    db.close()
    assert [(low, high) for _, low, high in found] == [(0, 2), (3, 4)]


def test_what_cannot_be_replayed_says_why(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="allowed: 0, 2, 4"):
        run_replay(copy, from_step=3)
    with pytest.raises(ConfigError, match="no run there"):
        run_replay(tmp_path)
    (copy / STORE_FILE).unlink()
    with pytest.raises(StoreError, match="no trajectory store"):
        run_replay(copy)


def test_retention_bounds_the_store_and_the_replay(tmp_path: Path, problems: Problems) -> None:
    bed = Bed(tmp_path, rl_settings(problems, {"tiny": TINY}))
    run_rl(bed.config(*OPTIONS, "steps=8", "checkpoint.keep=2", "store.keep_steps=1"))
    db = sqlite3.connect(bed.run_dir() / STORE_FILE)
    (oldest,) = db.execute("SELECT min(step) FROM episodes WHERE state = 'consumed'").fetchone()
    db.close()
    # Step 6 is the older of the two checkpoints: what was trained after it is needed.
    assert oldest == 7
    assert (run_replay(bed.run_dir()).first, run_replay(bed.run_dir()).last) == (7, 8)


# --- standing still -------------------------------------------------------------------------------


@pytest.fixture
def let_go() -> Iterator[threading.Event]:
    """Ends the rewards that hang when the test is over."""
    event = threading.Event()
    threading.stuck = event  # type: ignore[attr-defined]
    yield event
    event.set()
    del threading.stuck  # type: ignore[attr-defined]


def test_a_run_that_stands_still_ends_with_all_stacks(
    tmp_path: Path, problems: Problems, let_go: threading.Event
) -> None:
    reward = tmp_path / "slow.py"
    reward.write_text(
        "import threading\n\ndef never_ends(*args, **row):\n    threading.stuck.wait()\n"
    )
    bed = Bed(tmp_path, rl_settings(problems, {"tiny": TINY}))
    with pytest.raises(StallError, match="nothing moved for") as caught:
        run_rl(
            bed.config(
                *OPTIONS, f"rollout.reward.name={reward}:never_ends", "run.stall_timeout_s=1"
            )
        )
    message = str(caught.value)
    for words in (
        "in phase 'rollout' of step 1",
        "the caller waits in prepare_batch of 2",
        "thread MainThread",
        "in never_ends",
        "episode 0 attempt 0:",
        ".arun_episode",
    ):
        assert words in message, message
    status = read_status(bed.run_dir())
    assert status is not None
    assert status["phase"] == "ended by StallError"
    assert status["rollout"]["waiting"] is None


def test_a_failure_of_another_thread_ends_any_wait_of_the_main_one() -> None:
    def wait(stop: StopSignal) -> None:
        threading.Timer(0.05, stop.fail, [StallError("enough")]).start()
        threading.Event().wait(30)

    with StopSignal() as stop, pytest.raises(StallError, match="enough"):
        wait(stop)
    assert stop.requested is None
