"""Whole runs on pairs: what they reach, how they stop and go on, what they refuse."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tandem.errors import ConfigError
from tandem.models.loading import load_tokenizer
from tandem.trainers import run_dpo, run_eval, run_reward
from tests.runs.conftest import (
    TINY,
    Bed,
    Ended,
    Problems,
    capital,
    has_step,
    metrics,
    warmup_section,
    write_rows,
)
from tests.runs.launcher import Launcher
from tests.runs.test_resume import STOPPED, weights


@pytest.fixture(scope="session")
def pair_files(tmp_path_factory: pytest.TempPathFactory, problems: Problems) -> dict[str, Path]:
    """Pairs of the right capital and the one three letters on, for the words of the task."""
    folder = tmp_path_factory.mktemp("pairs")

    def pairs(path: Path) -> list[dict[str, str]]:
        words = [json.loads(line)["question"] for line in path.read_text().splitlines()]
        return [{"prompt": w, "chosen": capital(w), "rejected": capital(w, 3)} for w in words]

    return {
        name: write_rows(folder / f"{name}.jsonl", pairs(getattr(problems, name)))
        for name in ("train", "heldout")
    }


def settings(kind: str, files: dict[str, Path], steps: int, lr: float) -> dict[str, Any]:
    return {
        "kind": kind,
        "run": {"threads": 1},
        "model": {"tiny": TINY},
        kind: {
            "data": {"source": "jsonl", "path": str(files["train"])},
            "steps": steps,
            "batch_size": 16,
            "max_length": 16,
            "checkpoint_every": 5,
            "train": {"lr": lr},
        },
        "eval": {"data": {"source": "jsonl", "path": str(files["heldout"])}},
        "tracking": {"progress": False},
    }


@pytest.fixture
def dpo_bed(tmp_path: Path, pair_files: dict[str, Path]) -> Bed:
    return Bed(tmp_path, settings("dpo", pair_files, steps=20, lr=1e-3))


@pytest.fixture
def reward_bed(tmp_path: Path, pair_files: dict[str, Path]) -> Bed:
    return Bed(tmp_path, settings("reward", pair_files, steps=40, lr=3e-3))


def curve(run_dir: Path, prefix: str) -> list[dict[str, float]]:
    """What training and evaluation computed at each step, without times."""
    kept = (prefix, "preference/", "reward_model/", "eval/")
    return [
        {name: value for name, value in row.items() if name == "step" or name.startswith(kept)}
        for row in metrics(run_dir)
    ]


def test_a_warmed_up_model_learns_the_preference(
    tmp_path: Path, pair_files: dict[str, Path], problems: Problems
) -> None:
    bed = Bed(tmp_path, settings("dpo", pair_files, steps=30, lr=1e-3))
    bed.settings["warmup"] = warmup_section(problems, steps=60)
    summary = run_dpo(bed.config())
    assert summary["accuracy_before"] < 0.8
    assert summary["accuracy_after"] >= 0.95
    assert summary["margin_before"] == pytest.approx(0.0, abs=1e-5)
    assert summary["margin_after"] > 0.1
    assert summary["loss_after"] < summary["loss_before"]
    assert json.loads((bed.run_dir() / "summary.json").read_text()) == summary
    rows = metrics(bed.run_dir())
    assert [row["step"] for row in rows] == list(range(31))
    assert rows[0]["eval/heldout/policy_accuracy"] == summary["accuracy_before"]
    AutoModelForCausalLM.from_pretrained(summary["model_dir"])


def test_a_reward_model_learns_which_answer_is_right(
    reward_bed: Bed, pair_files: dict[str, Path]
) -> None:
    summary = run_reward(reward_bed.config("reward.steps=120", "reward.train.lr=1e-3"))
    assert summary["accuracy_after"] >= max(0.9, summary["accuracy_before"] + 0.2)
    model = AutoModelForSequenceClassification.from_pretrained(summary["model_dir"]).eval()
    tokenizer = load_tokenizer(summary["model_dir"])
    rows = [json.loads(line) for line in pair_files["heldout"].read_text().splitlines()]
    right = 0
    for row in rows:
        scores = []
        for answer in (row["chosen"], row["rejected"]):
            ids = tokenizer(row["prompt"] + answer)["input_ids"] + [tokenizer.eos_token_id]
            with torch.no_grad():
                scores.append(float(model(torch.tensor([ids])).logits))
        right += scores[0] > scores[1]
    assert right / len(rows) == pytest.approx(summary["accuracy_after"], abs=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("dpo.reference=precompute", "model.lora.rank=4", "dpo.train.lr=1e-2"),
        ("dpo.loss=kto",),
    ],
    ids=["full", "lora", "kto"],
)
def test_a_preference_run_resumes_bit_for_bit(dpo_bed: Bed, options: tuple[str, ...]) -> None:
    options = (*options, "dpo.checkpoint_every=4", "eval.every=3")
    run_dpo(dpo_bed.config(*options, "dpo.steps=10", name="reference"))
    run_dpo(dpo_bed.config(*options, "dpo.steps=7"))
    summary = run_dpo(dpo_bed.config(*options, "dpo.steps=10"), resume=True)
    ours, reference = dpo_bed.run_dir(), dpo_bed.run_dir("reference")
    # The shorter run evaluated at its end, which was step 7.
    assert _without_step(curve(ours, "dpo/"), 7) == _without_step(curve(reference, "dpo/"), 7)
    assert weights(ours / "model") == weights(reference / "model")
    assert summary["loss_before"] is not None


def _without_step(rows: list[dict[str, float]], step: int) -> list[dict[str, float]]:
    return [
        {k: v for k, v in row.items() if row["step"] != step or not k.startswith("eval/")}
        for row in rows
    ]


@pytest.mark.parametrize("kind", ["dpo", "reward"])
def test_a_stopped_run_saves_its_state_and_resumes(
    kind: str, dpo_bed: Bed, reward_bed: Bed, launcher: Launcher
) -> None:
    bed = dpo_bed if kind == "dpo" else reward_bed
    train = run_dpo if kind == "dpo" else run_reward
    rare = (f"{kind}.checkpoint_every=0", f"{kind}.steps=20")
    started = launcher.start(bed.folder / "log", *bed.arguments(*rare))
    assert started.signal_when(signal.SIGTERM, has_step(bed.run_dir(), 3)) == STOPPED
    assert "--resume" in started.log.read_text()
    last = metrics(bed.run_dir())[-1]["step"]
    assert 3 <= last < 20
    assert (bed.run_dir() / "checkpoints" / f"step_{last}").is_dir()
    summary = train(bed.config(*rare), resume=True)
    reference = train(bed.config(*rare, name="reference"))
    prefix = "dpo/" if kind == "dpo" else "reward_model/"
    assert curve(bed.run_dir(), prefix) == curve(bed.run_dir("reference"), prefix)
    assert weights(bed.run_dir() / "model") == weights(bed.run_dir("reference") / "model")
    for name in ("accuracy_before", "accuracy_after", "margin_after"):
        assert summary[name] == reference[name]


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dpo", "reward"])
def test_rows_without_rejected_are_named_with_their_columns(
    kind: str, dpo_bed: Bed, reward_bed: Bed, tandem_command: Callable[..., Ended]
) -> None:
    """B107, before anything is trained."""
    bed = dpo_bed if kind == "dpo" else reward_bed
    path = write_rows(bed.folder / "bad.jsonl", [{"prompt": "abc", "chosen": "A", "solutions": 1}])
    ended = tandem_command(*bed.arguments(f"{kind}.data.path={path}"))
    assert ended.code == 3
    assert "'rejected'" in ended.message
    assert "prompt, chosen, solutions" in ended.message
    assert "bad.jsonl" in ended.message


def test_bad_held_out_pairs_stop_a_run_before_its_warmup(
    dpo_bed: Bed, problems: Problems, tandem_command: Callable[..., Ended]
) -> None:
    dpo_bed.settings["warmup"] = warmup_section(problems, steps=60)
    path = write_rows(dpo_bed.folder / "bad.jsonl", [{"prompt": "abc", "chosen": "A"}])
    ended = tandem_command(*dpo_bed.arguments(f"eval.data.path={path}"))
    assert ended.code == 3
    assert not (dpo_bed.run_dir() / "warmup").exists()


def test_dry_run_prints_and_leaves_nothing(
    dpo_bed: Bed, tandem_command: Callable[..., Ended], capfd: pytest.CaptureFixture[str]
) -> None:
    assert tandem_command(*dpo_bed.arguments("dpo.beta=0.3"), "--dry-run").code == 0
    assert not dpo_bed.run_dir().exists()


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("dpo.gamma=1.0", "gamma"),
        ("dpo.desirable_weight=2.0", "desirable_weight"),
        ("dpo.loss=foo", "foo"),
        ("dpo.loss=ipo dpo.label_smoothing=0.1", "label_smoothing"),
        ("dpo.loss=kto dpo.sft_coef=1", "sft_coef"),
        ("dpo.loss=kto dpo.batch_size=1", "batch_size"),
        ("dpo.loss=orpo dpo.reference=precompute", "reference"),
        ("checkpoint.every=5", "dpo.checkpoint_every"),
    ],
)
def test_settings_that_would_mean_nothing_are_refused(
    dpo_bed: Bed, override: str, key: str
) -> None:
    with pytest.raises(ConfigError, match=key):
        dpo_bed.config(*override.split())


def test_changing_the_loss_on_resume_is_refused(dpo_bed: Bed) -> None:
    run_dpo(dpo_bed.config("dpo.steps=1"))
    with pytest.raises(ConfigError, match=r"dpo\.beta"):
        run_dpo(dpo_bed.config("dpo.steps=2", "dpo.beta=0.2"), resume=True)


def test_a_run_on_pairs_is_not_for_tandem_eval(dpo_bed: Bed) -> None:
    with pytest.raises(ConfigError, match="allowed: sft, rl"):
        run_eval(dpo_bed.config())
