"""Runs with more models than the policy: critic, reward model, teacher."""

from __future__ import annotations

import json
import random
import shutil
from collections import deque
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tandem.config import TrainConfig
from tandem.data.batch import collate
from tandem.errors import ConfigError
from tandem.models.loading import load_tokenizer
from tandem.train.local import LocalRewardEngine
from tandem.trainers import run_replay, run_rl
from tandem.types import SaveLoadMeta
from tests.runs.conftest import Bed, Warmed, capital, metrics

PPO = ("algorithm.advantage=gae", "critic.train.lr=3e-3")
SMALL = ("eval.data=null", "checkpoint.export_model=false")
LARGE = ("steps=20", "rollout.batch_size=8", "rollout.group_size=8", "checkpoint.every=0")


def trained(bed: Bed, name: str = "run") -> list[dict[str, float]]:
    """Metrics of the training steps without what differs between any two runs: times, and what is
    counted since the start of the process."""
    timed = ("timing_s/", "perf/tokens_per_s", "perf/trainer_wait", "perf/generator_idle")
    timed += ("staleness/length_bias",)
    return [
        {key: value for key, value in row.items() if not key.startswith(timed) and key != "time"}
        for row in metrics(bed.run_dir(name))
        if row["step"] > 0
    ]


def saved(bed: Bed, name: str, step: int, part: str) -> dict[str, bytes]:
    folder = bed.run_dir(name) / "checkpoints" / f"step_{step}" / part
    return {
        f"{file.name}:{key}": tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        for file in sorted(folder.rglob("*.safetensors"))
        for key, tensor in load_file(file).items()
    }


def test_ppo_with_a_critic_learns(bed: Bed):
    summary = run_rl(bed.config(*PPO, *LARGE))
    assert summary["accuracy_after"] >= summary["accuracy_before"] + 0.2
    rows = trained(bed)
    assert rows[-1]["critic/loss"] < 0.5 * rows[0]["critic/loss"]
    assert rows[-1]["critic/explained_variance"] > rows[0]["critic/explained_variance"]
    assert {"critic/grad_norm", "critic/lr", "critic/vf_clipfrac"} <= rows[0].keys()


def test_ppo_resumes_and_is_replayed_bit_for_bit(bed: Bed):
    """Critic, value clip over several optimizer steps, adaptive penalty, both schedules."""
    options = (
        *PPO,
        *SMALL,
        "algorithm.minibatches=2",
        "critic.epochs=2",
        "critic.warmup_steps=1",
        "critic.train.schedule=linear",
        "train.schedule=linear",
        "algorithm.kl_in_reward=true",
        "algorithm.kl_coef=0.1",
        "algorithm.kl_target=0.01",
        "algorithm.kl_horizon=50",
        "checkpoint.every=1",
        "checkpoint.keep=null",
        "steps=5",
    )
    run_rl(bed.config(*options, name="reference"))
    shutil.copytree(bed.run_dir("reference"), bed.run_dir())
    for step in (3, 4, 5):  # as if it had been killed in the third step
        shutil.rmtree(bed.run_dir() / "checkpoints" / f"step_{step}")
    run_rl(bed.config(*options), resume=True)
    assert trained(bed) == trained(bed, "reference")
    for part in ("policy", "critic"):
        assert saved(bed, "run", 5, part) == saved(bed, "reference", 5, part)
    assert run_replay(bed.run_dir("reference")).last == 5
    coefs = [row["actor/kl_coef"] for row in trained(bed, "reference")]
    assert coefs[0] == coefs[1] == 0.1  # the first step only warms the critic up
    assert len(set(coefs)) > 2


def test_warming_the_critic_up_leaves_the_policy_as_it_was(bed: Bed, warmed: Warmed):
    run_rl(bed.config(*PPO, *SMALL, "critic.warmup_steps=2", "steps=3", "checkpoint.every=2"))
    rows = trained(bed)
    assert ["actor/grad_norm" in row for row in rows] == [False, False, True]
    assert all("mismatch/same_version_max" in row and "critic/loss" in row for row in rows)
    folder = bed.run_dir() / "checkpoints"
    warm = AutoModelForCausalLM.from_pretrained(warmed.model).state_dict()

    def moved(step: int) -> bool:
        (file,) = (folder / f"step_{step}" / "policy").glob("*model*.safetensors")
        return any(
            not torch.equal(warm[name], tensor)
            for name, tensor in load_file(file).items()
            if name in warm
        )

    assert not moved(2)
    assert moved(3)


def test_offloaded_engines_compute_the_same(bed: Bed):
    away = [
        f"{engine}offload_{part}=true"
        for engine in ("train.", "critic.train.")
        for part in ("params", "optimizer", "grads")
    ]
    run_rl(bed.config(*PPO, *SMALL, "steps=2", name="resident"))
    run_rl(bed.config(*PPO, *SMALL, "steps=2", *away, name="away"))
    assert trained(bed, "away") == trained(bed, "resident")


def test_reinforce_plus_plus_learns_with_a_penalty_in_the_reward(bed: Bed):
    options = ("algorithm.kl_in_reward=true", "algorithm.advantage=reinforce++", *SMALL)
    run_rl(bed.config(*options, "algorithm.kl_coef=0.05", "train.lr=5e-3", "steps=3"))
    rows = trained(bed)
    assert rows[0]["actor/ref_kl"] == 0.0
    assert rows[2]["actor/ref_kl"] != 0.0
    assert rows[2]["reward/kl_penalty"] == pytest.approx(0.05 * rows[2]["actor/ref_kl"])
    assert "actor/kl_loss" not in rows[2]


def likes_right_answers(outputs, microbatch):
    error_B = outputs["scores"] - microbatch["margins"]
    return (microbatch["loss_weights"] * error_B**2).sum(), {}


likes_right_answers.required_outputs = frozenset({"scores"})  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def reward_model(tmp_path_factory: pytest.TempPathFactory, problems, warmed: Warmed) -> Path:
    """A scorer of answers: 1 for the right capital, 0 for another."""
    path = tmp_path_factory.mktemp("reward_model") / "model"
    tokenizer = load_tokenizer(str(warmed.model))
    words = [json.loads(line)["question"] for line in problems.train.read_text().splitlines()]
    engine = LocalRewardEngine(TrainConfig(lr=1e-3), model_path=str(warmed.model), seed=3)
    engine.initialize()
    recent = deque([1.0], maxlen=10)
    step = 0
    while sum(recent) / len(recent) > 0.05:  # 0.25 knows nothing
        assert step < 1000
        rows = []
        for number, word in enumerate(random.Random(step).sample(words, 32)):
            shift = (0, 3, 0, 1 + (step + number) % 7)[number % 4]
            ids = [*tokenizer.encode(word + capital(word, shift)), tokenizer.eos_token_id]
            target = torch.tensor(float(shift == 0))
            rows.append({"input_ids": torch.tensor(ids), "margins": target})
        batch = collate(rows)
        batch["loss_weights"] = torch.full((32,), 1 / 32)
        recent.append(engine.train_batch(batch, likes_right_answers)["loss"])
        step += 1
    engine.save(SaveLoadMeta(str(path), tokenizer=tokenizer))
    engine.destroy()
    return path


def test_the_policy_learns_from_a_reward_model_alone(bed: Bed, reward_model: Path):
    options = ("rollout.reward.name=model", "eval.reward.name=exact_match")
    summary = run_rl(bed.config(*options, *LARGE, f"reward_model.path={reward_model}"))
    assert summary["accuracy_after"] >= summary["accuracy_before"] + 0.2
    rows = trained(bed)
    assert rows[-1]["reward/model_mean"] > rows[0]["reward/model_mean"] + 0.1
    assert all(row["reward/mean"] == row["reward/model_mean"] for row in rows)
    assert all(row["reward/rollout_mean"] == 0 for row in rows)


def test_a_score_is_added_to_a_verifiable_reward_by_its_weight(bed: Bed, reward_model: Path):
    run_rl(
        bed.config(*SMALL, "steps=1", f"reward_model.path={reward_model}", "reward_model.weight=3")
    )
    (row,) = trained(bed)
    expected = row["reward/rollout_mean"] + 3 * row["reward/model_mean"]
    assert row["reward/mean"] == pytest.approx(expected, abs=1e-6)


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory, problems, warmed: Warmed) -> Path:
    """A policy that has learnt the task."""
    from tests.runs.conftest import rl_settings

    settings = rl_settings(problems, {"path": str(warmed.model)})
    bed = Bed(tmp_path_factory.mktemp("teacher"), settings)
    summary = run_rl(bed.config(*LARGE))
    assert summary["accuracy_after"] > 0.8
    return Path(summary["model_dir"])


@pytest.mark.parametrize(
    "options",
    [
        ("algorithm.advantage=none", "teacher.top_k=4"),
        ("algorithm.advantage=none", "teacher.top_k=4", "teacher.divergence=forward"),
        ("algorithm.advantage=teacher_reverse_kl", "algorithm.policy_loss=reinforce"),
        ("algorithm.advantage=teacher_forward_kl", "algorithm.policy_loss=reinforce"),
    ],
    ids=["reverse top-k", "forward top-k", "reverse sampled", "forward sampled"],
)
def test_a_student_learns_from_its_teacher_without_a_reward(
    bed: Bed, teacher: Path, options: tuple[str, ...]
):
    # A reward of 0 for everything: what is learnt comes from the teacher alone.
    zero = bed.folder / "zero.py"
    zero.write_text("def zero(prompt, completion, prompt_ids, completion_ids):\n    return 0.0\n")
    nothing = (f"rollout.reward.name={zero}:zero", "eval.reward.name=exact_match")
    more = ("rollout.batch_size=8", "rollout.group_size=4", "steps=10", "checkpoint.every=0")
    summary = run_rl(bed.config(*options, *nothing, *more, f"teacher.path={teacher}"))
    assert summary["accuracy_after"] >= summary["accuracy_before"] + 0.2
    rows = trained(bed)
    gap = "actor/distill_loss" if "teacher.top_k=4" in options else "actor/teacher_kl"
    assert sum(row[gap] for row in rows[-3:]) < sum(row[gap] for row in rows[:3])
    assert all(row["reward/mean"] == 0 for row in rows)


def test_models_that_cannot_serve_are_refused_before_anything_is_trained(
    bed: Bed, warmed: Warmed, teacher: Path, tmp_path: Path
):
    with pytest.raises(ConfigError, match=r"reward_model.path: .* has no score"):
        run_rl(bed.config(f"reward_model.path={warmed.model}"))
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace('"a"', '"z"'))
    with pytest.raises(ConfigError, match=r"teacher.path: the vocabulary .* differs .*'a', 'z'"):
        run_rl(bed.config("algorithm.advantage=teacher_reverse_kl", f"teacher.path={other}"))
    with pytest.raises(ConfigError, match=r"teacher.top_k: got 999, allowed: up to"):
        run_rl(
            bed.config("algorithm.advantage=none", "teacher.top_k=999", f"teacher.path={teacher}")
        )


def test_shaping_reaches_rewards_and_mask(bed: Bed):
    options = (
        "algorithm.shaping.truncated_reward=-1",
        "algorithm.shaping.overlong_cache=2",
        "algorithm.shaping.max_tokens=3",
        "rollout.generation.temperature=3.0",
    )
    run_rl(bed.config(*SMALL, *options, "steps=1", "rollout.batch_size=8"))
    (row,) = trained(bed)
    assert 0 < row["reward/filtered_fraction"] < 1
    assert row["rewards_missing"] == pytest.approx(row["reward/filtered_fraction"] * 32)
    assert row["actor/num_trained_tokens"] < row["response_length/mean"] * 32
