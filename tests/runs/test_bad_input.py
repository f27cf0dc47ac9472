"""What a user can get wrong, or a machine: one clear error, its exit code, and nothing lost."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fsspec.registry import known_implementations

from tandem.checkpoint.image import FileImage
from tandem.trainers import run_rl
from tests.runs.conftest import Bed, Ended, metrics, write_rows

CONFIG, DATA, ROLLOUT, CHECKPOINT = 2, 3, 5, 6

Command = Callable[..., Ended]


# --- before anything is trained -------------------------------------------------------------------


def test_unknown_key_is_refused_with_a_suggestion(bed: Bed, tandem_command: Command):
    ended = tandem_command(*bed.arguments("rollout.batchsize=4"))
    assert ended.code == CONFIG
    assert "rollout.batchsize" in ended.message
    assert "batch_size" in ended.message
    assert not bed.run_dir().exists()


@pytest.mark.parametrize(
    ("override", "allowed"),
    [("inference.threads=1000", "allowed here: 1 to"), (f"run.seed={2**63}", "less than")],
)
def test_numbers_beyond_the_machine_are_refused_before_anything_is_written(
    bed: Bed, tandem_command: Command, override: str, allowed: str
):
    ended = tandem_command(*bed.arguments(override))
    assert ended.code == CONFIG
    assert ended.message.startswith(
        f"error: {override.split('=')[0]}: got {override.split('=')[1]}"
    )
    assert allowed in ended.message
    assert not bed.run_dir().exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_absent_device_is_refused_before_anything_is_written(bed: Bed, tandem_command: Command):
    ended = tandem_command(*bed.arguments("train.device=cuda"))
    assert ended.code == CONFIG
    assert ended.message.startswith("error: train.device: got 'cuda'")
    assert not bed.run_dir().exists()


@pytest.mark.parametrize("flags", [(), ("--dry-run",)])
@pytest.mark.parametrize("url", ["nosuch://bucket/run", "simplecache::nosuch://bucket"])
def test_unknown_store_is_refused_before_anything_is_written(
    bed: Bed, tandem_command: Command, url: str, flags: tuple[str, ...]
):
    ended = tandem_command(*bed.arguments(f"checkpoint.upload_url={url}"), *flags)
    assert ended.code == CONFIG
    assert ended.message.startswith(f"error: checkpoint.upload_url: got '{url}': nosuch://")
    assert not bed.run_dir().exists()


def test_store_whose_package_is_missing_is_refused_before_anything_is_written(
    bed: Bed, tandem_command: Command, monkeypatch: pytest.MonkeyPatch
):
    entry = {"class": "no_such_package.Store", "err": "Install no_such_package"}
    monkeypatch.setitem(known_implementations, "absent", entry)
    ended = tandem_command(*bed.arguments("checkpoint.upload_url=absent://bucket"))
    assert ended.code == CONFIG
    assert "Install no_such_package" in ended.message
    assert not bed.run_dir().exists()


def test_missing_file_is_named(bed: Bed, tandem_command: Command):
    ended = tandem_command(*bed.arguments("data.path=no/such.jsonl"))
    assert ended.code == DATA
    assert ended.message == "error: data.path: no such file or directory: 'no/such.jsonl'\n"


@pytest.mark.parametrize(
    ("option", "code", "complaint"),
    [
        ("data.path=no/such.jsonl", DATA, "no/such.jsonl"),
        ("eval.data.path=no/such.jsonl", DATA, "no/such.jsonl"),
        ("algorithm.advantage=grop", CONFIG, "algorithm.advantage: got 'grop'"),
        ("algorithm.advantage_kwargs={nope: 1}", CONFIG, "nope: grpo does not take it"),
        ("algorithm.policy_loss=ppo", CONFIG, "policy_loss: got 'ppo'"),
        ("rollout.workflow=no_such.py:Workflow", CONFIG, "no_such.py"),
        ("rollout.reward.name=no_such.py:score", CONFIG, "no_such.py"),
        ("eval.reward.name=no_such.py:score", CONFIG, "no_such.py"),
        ("train.backend=nope", CONFIG, "no train engine"),
        ("train.device=cuda", CONFIG, "train.device: got 'cuda', but there is no CUDA device"),
        ("warmup.train.device=cuda:1", CONFIG, "warmup.train.device: got 'cuda:1'"),
        ("inference.max_context=1", CONFIG, "no room for a prompt"),
    ],
)
def test_mistake_in_reinforcement_learning_costs_no_warm_up(
    cold_bed: Bed, tandem_command: Command, option: str, code: int, complaint: str
):
    ended = tandem_command(*cold_bed.arguments("warmup.steps=2", "steps=1", option))
    assert ended.code == code
    assert complaint in ended.message
    assert metrics(cold_bed.run_dir() / "warmup") == []


def test_start_that_failed_can_be_repeated_with_other_settings(
    bed: Bed, cold_bed: Bed, tandem_command: Command
):
    options = ("warmup.steps=2", "steps=1")
    failed = tandem_command(*cold_bed.arguments(*options, "data.path=no/such.jsonl"))
    assert failed.code == DATA
    warm_up_failed = tandem_command(
        *cold_bed.arguments(*options, "warmup.data.path=no/such.jsonl", name="other")
    )
    assert warm_up_failed.code == DATA
    repeated = tandem_command(*cold_bed.arguments(*options, "run.seed=5", name="other"))
    assert repeated == Ended(0, "")


@pytest.mark.parametrize(
    ("option", "code", "complaint"),
    [
        ("data.path=no/such.jsonl", DATA, "data.path: no such file"),
        ("eval.data.path=no/such.jsonl", DATA, "data.path: no such file"),
        ("algorithm.policy_loss=ppo_clop", CONFIG, "policy_loss: got 'ppo_clop'"),
        ("algorithm.advantage=grop", CONFIG, "algorithm.advantage: got 'grop'"),
        ("algorithm.advantage_kwargs={dof: 1}", CONFIG, "advantage_kwargs.dof: grpo does not"),
        ("rollout.workflow=no/such.py:Workflow", CONFIG, "rollout.workflow"),
        ("rollout.reward.name=exact", CONFIG, "reward.name: got 'exact'"),
    ],
)
def test_what_is_wrong_with_the_task_is_said_before_the_warm_up(
    cold_bed: Bed, tandem_command: Command, option: str, code: int, complaint: str
):
    ended = tandem_command(*cold_bed.arguments(option))
    assert ended.code == code
    assert complaint in ended.message
    assert not (cold_bed.run_dir() / "warmup").exists()


def test_empty_dataset_is_an_error(bed: Bed, tandem_command: Command):
    path = write_rows(bed.folder / "empty.jsonl", [])
    ended = tandem_command(*bed.arguments(f"data.path={path}"))
    assert ended.code == DATA
    assert str(path) in ended.message
    assert "no rows" in ended.message


def test_missing_column_is_named_with_those_that_are_there(bed: Bed, tandem_command: Command):
    path = write_rows(bed.folder / "rows.jsonl", [{"problem": "abc", "answer": "C"}])
    ended = tandem_command(*bed.arguments(f"data.path={path}"))
    assert ended.code == DATA
    assert "missing column 'prompt'" in ended.message
    assert "present: problem, answer" in ended.message


def test_missing_answer_is_an_error_of_the_reward(bed: Bed, tandem_command: Command):
    path = write_rows(bed.folder / "rows.jsonl", [{"question": "abc", "solution": "C"}])
    ended = tandem_command(*bed.arguments(f"data.path={path}", "eval.data=null"))
    assert ended.code in (CONFIG, DATA, ROLLOUT)
    assert "answer" in ended.message


@pytest.mark.parametrize("section", ["data", "eval.data"])
def test_prompt_longer_than_the_context_is_an_error_before_training(
    bed: Bed, tandem_command: Command, section: str
):
    rows = [{"question": "abc", "answer": "C"}, {"question": "a" * 16, "answer": "A"}]
    path = write_rows(bed.folder / "rows.jsonl", rows)
    ended = tandem_command(*bed.arguments(f"{section}.path={path}"))
    assert ended.code == DATA
    assert f"{path}, row 2" in ended.message
    assert "16 tokens > 15" in ended.message
    assert metrics(bed.run_dir()) == []


def test_prompt_longer_than_the_generator_takes_is_an_error_before_training(
    bed: Bed, tandem_command: Command
):
    path = write_rows(bed.folder / "rows.jsonl", [{"question": "abcde", "answer": "C"}])
    for option in ("inference.max_context=5", "rollout.generation.max_tokens=5"):
        ended = tandem_command(*bed.arguments(f"data.path={path}", option))
        assert ended.code == DATA
        assert "5 tokens > 4" in ended.message


def test_demonstration_longer_than_a_microbatch_is_an_error_before_training(
    sft_bed: Bed, tandem_command: Command
):
    path = write_rows(sft_bed.folder / "rows.jsonl", [{"question": "abcdef", "answer": "C"}])
    options = (f"sft.data.path={path}", "sft.train.max_tokens_per_microbatch=6")
    ended = tandem_command(*sft_bed.arguments(*options))
    assert ended.code == DATA
    assert f"{path}, row 1" in ended.message
    assert metrics(sft_bed.run_dir()) == []


def test_demonstration_longer_than_allowed_is_an_error_before_training(
    sft_bed: Bed, tandem_command: Command
):
    path = write_rows(sft_bed.folder / "rows.jsonl", [{"question": "a" * 20, "answer": "A"}])
    ended = tandem_command(*sft_bed.arguments(f"sft.data.path={path}"))
    assert ended.code == DATA
    assert f"{path}, row 1" in ended.message
    ended = tandem_command(*sft_bed.arguments(f"sft.data.path={path}", "sft.max_length=512"))
    assert ended.code == CONFIG
    assert "sft.max_length: got 512, allowed: <= 16" in ended.message
    assert metrics(sft_bed.run_dir()) == []


def test_directory_that_holds_a_run_is_left_alone(bed: Bed, tandem_command: Command):
    assert tandem_command(*bed.arguments("steps=1")).code == 0
    before = (bed.run_dir() / "metrics.jsonl").read_bytes()
    ended = tandem_command(*bed.arguments("steps=1"))
    assert ended.code == CONFIG
    assert "already holds a run; continue it with --resume" in ended.message
    assert (bed.run_dir() / "metrics.jsonl").read_bytes() == before


def test_output_directory_that_cannot_be_written_is_named(bed: Bed, tandem_command: Command):
    (bed.folder / "file").touch()
    ended = tandem_command(*bed.arguments(f"run.output_dir={bed.folder / 'file'}"))
    assert ended.code == CONFIG
    assert "run.output_dir: cannot write" in ended.message


def test_resuming_what_does_not_exist_is_an_error(bed: Bed, tandem_command: Command):
    ended = tandem_command(*bed.arguments(), "--resume")
    assert ended.code == CONFIG
    assert "holds no run; start it without --resume" in ended.message
    assert not bed.run_dir().exists()


@pytest.mark.parametrize("content", [b"steps: [", b"\xff\xfe", b"", b"steps: 0\n"])
def test_damaged_configuration_of_the_run_is_named_on_resume(
    bed: Bed, tandem_command: Command, content: bytes
):
    assert tandem_command(*bed.arguments("steps=1")).code == 0
    (bed.run_dir() / "config.yaml").write_bytes(content)
    ended = tandem_command(*bed.arguments("steps=1"), "--resume")
    assert ended.code == CONFIG
    assert "config.yaml' is damaged" in ended.message


def test_key_that_may_not_change_on_resume_is_named(bed: Bed, tandem_command: Command):
    assert tandem_command(*bed.arguments("steps=1")).code == 0
    ended = tandem_command(*bed.arguments("steps=2", "train.lr=0.5"), "--resume")
    assert ended.code == CONFIG
    assert "train.lr: the run has 0.001, got 0.5" in ended.message
    assert "steps" not in ended.message.splitlines()[0]
    assert tandem_command(*bed.arguments("steps=2"), "--resume").code == 0
    assert [row["step"] for row in metrics(bed.run_dir())] == [0, 1, 2]


# --- rewards that misbehave -----------------------------------------------------------------------

REWARDS = """
import time


def raises(prompt, completion, prompt_ids, completion_ids, **row):
    raise KeyError("no such thing")


def hangs(prompt, completion, prompt_ids, completion_ids, **row):
    time.sleep(3600)


def nan(prompt, completion, prompt_ids, completion_ids, **row):
    return float("nan")


def text(prompt, completion, prompt_ids, completion_ids, **row):
    return "good"


def sometimes(prompt, completion, prompt_ids, completion_ids, answer, **row):
    if prompt < "d":
        raise ValueError("not this one")
    return float(completion == answer)
"""


@pytest.fixture
def rewards(bed: Bed) -> Path:
    path = bed.folder / "rewards.py"
    path.write_text(REWARDS)
    return path


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("raises", (), "the reward raised KeyError: 'no such thing'"),
        ("nan", (), "the reward returned nan, allowed: a finite number or None"),
        ("text", (), "the reward returned a str, allowed: a finite number or None"),
        ("hangs", ("timeout_s=0.3",), "the reward did not end within 0.3 s"),
        ("hangs", ("timeout_s=0.3", "process=true"), "the reward did not end within 0.3 s"),
    ],
    ids=["raises", "nan", "text", "hangs", "hangs-in-a-process"],
)
def test_reward_that_always_fails_ends_the_run_and_says_why(
    bed: Bed,
    tandem_command: Command,
    rewards: Path,
    name: str,
    options: tuple[str, ...],
    complaint: str,
):
    ended = tandem_command(
        *bed.arguments(
            f"rollout.reward.name={rewards}:{name}",
            *(f"rollout.reward.{option}" for option in options),
            "rollout.max_failures_in_row=2",
            "rollout.group_size=2",
            "eval.reward.name=exact_match",
        )
    )
    assert ended.code == ROLLOUT
    assert complaint in ended.message
    # The model was never trained on an invented score, and the evaluation before is kept.
    assert [row["step"] for row in metrics(bed.run_dir())] == [0]


def test_reward_that_fails_sometimes_costs_those_episodes_only(bed: Bed, rewards: Path):
    config = bed.config(
        f"rollout.reward.name={rewards}:sometimes", "eval.reward.name=exact_match", "steps=3"
    )
    assert run_rl(config)["steps"] == 3
    rows = metrics(bed.run_dir())[1:]
    assert sum(row["rollout/failed"] for row in rows) > 0
    assert all(row["actor/num_rows"] == 16 for row in rows)


# --- checkpoints that cannot be written or read ---------------------------------------------------


def test_full_disk_while_saving_leaves_the_run_resumable(
    bed: Bed, tandem_command: Command, monkeypatch: pytest.MonkeyPatch
):
    run_rl(bed.config("steps=4", "checkpoint.every=1", name="reference"))
    arguments = bed.arguments("steps=4", "checkpoint.every=1")
    with monkeypatch.context() as patch:
        original = FileImage.write

        def full(image: FileImage, path: Path) -> None:
            if "step_2" in str(path):
                path.write_bytes(b"half a f")
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            original(image, path)

        patch.setattr(FileImage, "write", full)
        ended = tandem_command(*arguments)
    assert ended.code == CHECKPOINT
    assert "No space left on device" in ended.message
    assert "free disk space" in ended.message
    left = {path.name for path in (bed.run_dir() / "checkpoints").iterdir()}
    assert left == {"step_0", "step_1"}
    assert tandem_command(*arguments, "--resume") == Ended(0, "")
    ours, reference = metrics(bed.run_dir()), metrics(bed.run_dir("reference"))
    assert [row.get("actor/grad_norm") for row in ours] == [
        row.get("actor/grad_norm") for row in reference
    ]


def test_damaged_newest_checkpoint_is_skipped_with_a_warning(
    bed: Bed, tandem_command: Command, caplog: pytest.LogCaptureFixture
):
    run_rl(bed.config("steps=3", "checkpoint.every=1", name="reference"))
    assert tandem_command(*bed.arguments("steps=2", "checkpoint.every=1")).code == 0
    newest = bed.run_dir() / "checkpoints" / "step_2"
    victim = max(newest.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    ended = tandem_command(*bed.arguments("steps=3", "checkpoint.every=1"), "--resume")
    assert ended.code == 0
    assert "step_2" in caplog.text
    assert "checkpoint skipped" in caplog.text
    ours, reference = metrics(bed.run_dir()), metrics(bed.run_dir("reference"))
    assert [row["step"] for row in ours] == [0, 1, 2, 3]
    assert ours[-1]["actor/grad_norm"] == reference[-1]["actor/grad_norm"]


def test_no_checkpoint_that_can_be_trusted_is_an_error(bed: Bed, tandem_command: Command):
    assert tandem_command(*bed.arguments("steps=1")).code == 0
    for manifest in (bed.run_dir() / "checkpoints").glob("step_*/manifest.json"):
        manifest.write_text(json.dumps({}))
    ended = tandem_command(*bed.arguments("steps=2"), "--resume")
    assert ended.code == CHECKPOINT
    assert "no checkpoint can be trusted" in ended.message
