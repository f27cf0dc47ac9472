"""``tandem rollouts`` and what ``tandem status`` says of a run that is alive."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tandem.cli import main
from tandem.data.batch import collate
from tandem.observe.status import STATUS_FILE
from tandem.rollout.encoding import pack_rows
from tandem.rollout.rows import check_rows
from tandem.rollout.snapshot import RolloutSnapshot, RunningEpisode
from tandem.store import STORE_FILE, Content, SqliteStore
from tandem.types import EPISODE_STRIDE
from tests.store.episodes import S, stored

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Run a command here; its exit code and all that it printed, on a wide screen."""
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["tandem", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        captured = capfd.readouterr()
        return code, captured.out + captured.err

    return run


def rows(episode_id: int) -> bytes:
    made = collate(
        [
            {
                "input_ids": torch.tensor([3, 4, *completion]),
                "loss_mask": torch.tensor([False, False, *[True] * len(completion)]),
                "logprobs": torch.tensor([0.0, 0.0, *[-0.5] * len(completion)]),
                "versions": torch.tensor([-1, -1, *[6] * len(completion)]),
                "rewards": torch.tensor(reward),
            }
            for completion, reward in (([7, 2], 1.0), ([8], float("nan")))
        ]
    )
    return pack_rows(check_rows(made, episode_id, 0)[0])


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Episode 1:2 was trained on in step 7, 0:5 failed, 0:6 is ready."""
    store = SqliteStore(tmp_path / STORE_FILE)
    first = EPISODE_STRIDE + 2
    content = Content(
        "2 + 5 =",
        ("7", "eight"),
        (1.0, None),
        ({"name": "generate", "start_s": 0.1, "s": 0.25, "num_tokens": 2},),
        rows(first),
    )
    trained = stored(
        1, first, state=S.CONSUMED, step=7, closed_version=7, newest_version=6, content=content
    )
    broken = stored(
        2,
        5,
        state=S.FAILED,
        reason="ValueError: broken\nsecond line",
        reward=None,
        num_rows=0,
        oldest_version=None,
        content=Content("1 +"),
    )
    store.write([trained, broken, stored(3, 6, reward=0.25)])
    store.close()
    return tmp_path


def test_list_counts_the_states_and_names_reasons(run_dir: Path, command: Command) -> None:
    code, text = command("rollouts", run_dir)
    assert code == 0
    head, _, *lines = text.splitlines()
    assert head == "consumed 1, failed 1, ready 1"
    assert lines[0].split() == ["1:2", "0", "consumed", "7", "0-6", "1", "1", "2", "0.00"]
    reason = ["ValueError:", "broken"]
    assert lines[1].split() == ["0:5", "0", "failed", "-", "-", "-", "0", "2", "0.00", *reason]
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--state", "ready", "--state", "failed"), ["0:5", "0:6"]),
        (("--step", "7"), ["1:2"]),
        (("--min-reward", "0.2", "--max-reward", "0.5"), ["0:6"]),
        (("--limit", "1"), ["0:6"]),
        (("--state", "stale"), []),
    ],
)
def test_list_filters(
    run_dir: Path, command: Command, options: tuple[str, ...], expected: list[str]
) -> None:
    _, text = command("rollouts", run_dir, "list", *options)
    assert [line.split()[0] for line in text.splitlines()[2:]] == expected


def test_show_prints_texts_rewards_and_spans(run_dir: Path, command: Command) -> None:
    code, text = command("rollouts", run_dir, "show", "1:2")
    assert code == 0
    for words in (
        "episode 1:2 attempt 0: consumed",
        "trained in step 7",
        "versions 0-6 of start start",
        "generate: 0.250 s, num_tokens 2",
        "prompt: 2 + 5 =",
        "[0] reward 1: 7",
        "[1] reward -: eight",
    ):
        assert words in text, text


def test_export_writes_one_record_a_trajectory(run_dir: Path, command: Command) -> None:
    out = run_dir / "out.jsonl"
    code, text = command("rollouts", run_dir, "export", "--out", out, "--min-reward", "1")
    assert (code, "2 trajectories" in text) == (0, True)
    first, second = (json.loads(line) for line in out.read_text().splitlines())
    assert first["input_ids"] == [3, 4, 7, 2]
    assert first["loss_mask"] == [False, False, True, True]
    assert first["versions"] == [-1, -1, 6, 6]
    assert first["logprobs"] == [0.0, 0.0, -0.5, -0.5]
    assert (first["epoch"], first["position"], first["step"]) == (1, 2, 7)
    assert (first["sample"], first["completion"], first["reward"]) == (0, "7", 1.0)
    assert second["input_ids"] == [3, 4, 8]
    assert (second["completion"], second["reward"]) == ("eight", None)


def test_parquet_has_the_same_records(run_dir: Path, command: Command) -> None:
    import pyarrow.parquet as pq

    for name in ("out.jsonl", "out.parquet"):
        options = ("--state", "consumed", "--state", "failed")
        assert command("rollouts", run_dir, "export", "-o", run_dir / name, *options)[0] == 0
    lines = (run_dir / "out.jsonl").read_text().splitlines()
    table = pq.read_table(run_dir / "out.parquet").to_pylist()
    by_name = [dict(sorted(json.loads(line).items())) for line in lines]
    assert [dict(sorted(record.items())) for record in table] == by_name
    failed = table[-1]
    assert (failed["state"], failed["input_ids"], failed["prompt"]) == ("failed", None, "1 +")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("show",), 2, "name an episode"),
        (("show", "1:2:3"), 2, "EPOCH:POSITION"),
        (("show", "-1"), 2, ""),
        (("show", "0:99"), 3, "no attempt"),
        (("export",), 2, "--out"),
        (("export", "--out", "x.csv"), 2, ".jsonl or .parquet"),
        (("export", "--out", "/nowhere/x.jsonl"), 2, "cannot write"),
        (("list", "--state", "odd"), 2, "odd"),
    ],
)
def test_mistakes_end_with_a_line_and_a_code(
    run_dir: Path, command: Command, arguments: tuple[str, ...], code: int, words: str
) -> None:
    ended, text = command("rollouts", run_dir, *arguments)
    assert ended == code
    assert words in text


def test_a_directory_without_a_store_says_so(tmp_path: Path, command: Command) -> None:
    code, text = command("rollouts", tmp_path)
    assert code == 6
    assert "no trajectory store" in text
    assert command("rollouts", tmp_path / "nothing")[0] == 2


# --- status ---------------------------------------------------------------------------------------


def status(pid: int) -> dict[str, object]:
    snapshot = RolloutSnapshot(
        version=3,
        is_paused=False,
        capacity=0,
        max_concurrent=8,
        max_staleness=1,
        batch_size=4,
        states={"queued": 4, "running": 8, "ready": 0},
        queued_for_s=2.0,
        running=(RunningEpisode("episode 9 attempt 1", 61.0, 300.0),),
        num_running=8,
        num_ended=12,
        waiting="prepare_batch of 4",
        waits_until_s=540.0,
        last_failure="",
    )
    return {
        "time": time.time(),
        "host": os.uname().nodename,
        "pid": pid,
        "phase": "rollout",
        "phase_for_s": 60.0,
        "step": 4,
        "steps": 10,
        "still_for_s": 33.0,
        "stall_timeout_s": 1800.0,
        "rollout": snapshot.to_json(),
        "backend": {"running": 8, "tokens": 1234},
    }


def test_status_of_a_living_run_says_who_waits_for_what(tmp_path: Path, command: Command) -> None:
    (tmp_path / "config.yaml").write_text("kind: rl\n")
    (tmp_path / STATUS_FILE).write_text(json.dumps(status(os.getpid())))
    code, text = command("status", tmp_path)
    assert code == 0
    for words in (
        f"process {os.getpid()}",
        "rollout for 60 s, step 4 of 10",
        "nothing has moved for 33 s (limit 1800 s)",
        "capacity 0: concurrency 8, staleness (1 + 1) * 4",
        "states: queued 4, running 8",
        "the caller waits in prepare_batch of 4, for 540 s more",
        "queued for 2.0 s",
        "running for 61.0 of 300 s: episode 9 attempt 1",
        "generator: running 8, tokens 1234",
    ):
        assert words in text, text


def test_status_of_a_dead_run_does_not_pretend_that_it_lives(
    tmp_path: Path, command: Command
) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    (tmp_path / "config.yaml").write_text("kind: rl\n")
    (tmp_path / STATUS_FILE).write_text(json.dumps(status(pid)))
    _, text = command("status", tmp_path)
    assert "no process of it runs here; it was in phase 'rollout'" in text
    assert "capacity" not in text
