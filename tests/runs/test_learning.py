"""Whole runs of reinforcement learning: what they reach and what they leave behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.config import EvalConfig, InferenceConfig, RolloutConfig
from tandem.data.prompts import open_prompts
from tandem.models.loading import load_tokenizer
from tandem.rollout import EmbeddedInferenceEngine, SingleTurnWorkflow
from tandem.trainers import run_rl
from tests.runs.conftest import Bed, Warmed, metrics


@pytest.fixture(scope="module")
def learnt(tmp_path_factory, problems, warmed):
    """An asynchronous run with its generator in a process of its own."""
    from tests.runs.conftest import rl_settings

    settings = rl_settings(problems, {"path": str(warmed.model)})
    bed = Bed(tmp_path_factory.mktemp("learnt"), settings)
    config = bed.config(
        "steps=24",
        "rollout.batch_size=8",
        "rollout.group_size=8",
        "rollout.max_staleness=1",
        "inference.mode=process",
        "checkpoint.every=0",
    )
    return bed, config, run_rl(config)


def test_asynchronous_run_learns(learnt):
    bed, _, summary = learnt
    rewards = [row["reward/mean"] for row in metrics(bed.run_dir()) if "reward/mean" in row]
    assert len(rewards) == 24
    assert sum(rewards[-6:]) / 6 > sum(rewards[:6]) / 6 + 0.1
    assert summary["accuracy_after"] >= summary["accuracy_before"] + 0.2


def test_summary_says_how_the_run_ended(learnt):
    bed, config, summary = learnt
    assert json.loads((bed.run_dir() / "summary.json").read_text()) == summary
    assert summary["steps"] == config.steps
    assert summary["seed"] == config.run.seed
    assert summary["wall_s"] >= summary["train_s"] > 0
    # One version of delay is what lets the two processes overlap: it must occur, and no more.
    assert summary["max_staleness_seen"] == config.rollout.max_staleness
    assert 0 <= summary["mismatch_max"] < 1e-4
    assert summary["model_dir"] == str(bed.run_dir() / "model")


def test_run_says_what_share_of_its_time_either_side_had_nothing_to_do(learnt):
    bed, _, summary = learnt
    rows = [row for row in metrics(bed.run_dir()) if row["step"] > 0]
    waited = [row["timing_s/rollout"] / row["timing_s/step"] for row in rows]
    assert [row["perf/trainer_wait_share"] for row in rows] == pytest.approx(waited)
    assert 0 < summary["trainer_wait_share"] < 1
    assert summary["trainer_wait_share"] == pytest.approx(
        sum(row["timing_s/rollout"] for row in rows) / sum(row["timing_s/step"] for row in rows)
    )
    idle = [row["perf/generator_idle_share"] for row in rows]
    assert all(0 <= share < 1 for share in idle)
    assert min(idle) <= summary["generator_idle_share"] <= max(idle)


def test_exported_model_gives_the_same_greedy_tokens_in_plain_transformers(learnt):
    _, config, summary = learnt
    path = summary["model_dir"]
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    prompts = open_prompts(config.eval.data, load_tokenizer(path)).all()
    for prompt, row in zip(prompts, greedy_rows(path, config.eval, prompts), strict=True):
        ids = torch.tensor([prompt.data["prompt_ids"]])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=config.eval.generation.max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        assert row["input_ids"][row["attention_mask"]].tolist() == output[0].tolist()


def greedy_rows(path: str, config: EvalConfig, prompts):
    engine = EmbeddedInferenceEngine(
        InferenceConfig(mode="inprocess"), RolloutConfig(), model_path=path, incarnation="test"
    )
    engine.initialize()
    workflow = SingleTurnWorkflow(lambda *_: 0.0, config.generation, load_tokenizer(path))
    try:
        return engine.rollout_batch(prompts, workflow)
    finally:
        engine.destroy()


def test_learning_rate_zero_leaves_the_accuracy_as_it_was(warmed: Warmed):
    summary = warmed.summary
    assert summary["steps"] == 2
    assert summary["accuracy_after"] == summary["accuracy_before"]
    exported = AutoModelForCausalLM.from_pretrained(summary["model_dir"]).state_dict()
    for name, before in AutoModelForCausalLM.from_pretrained(warmed.model).state_dict().items():
        assert torch.equal(exported[name], before), name


def test_a_finished_run_can_be_read_back(learnt):
    bed, _, _ = learnt
    rows = metrics(bed.run_dir())
    assert [row["step"] for row in rows] == list(range(25))
    for row in rows[1:]:
        assert row["staleness/max"] <= 1
        assert row["mismatch/same_version_max"] < 1e-4 if "mismatch/same_version_max" in row else 1
    assert Path(bed.run_dir() / "checkpoints" / "step_24").is_dir()
