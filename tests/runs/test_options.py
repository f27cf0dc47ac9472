"""Options of the objective and of the loop, each through a whole run."""

from __future__ import annotations

import shutil

import pytest

from tandem.algorithms.policy import POLICY_LOSSES
from tandem.errors import CapabilityError, ConfigError
from tandem.trainers import run_rl
from tests.runs.conftest import Bed, Warmed, metrics


def steps_of(bed: Bed, *overrides: str, name: str = "run") -> list[dict[str, float]]:
    """The metrics of the training steps of a run without evaluation."""
    run_rl(bed.config("eval.data=null", "checkpoint.export_model=false", *overrides, name=name))
    return [row for row in metrics(bed.run_dir(name)) if row["step"] > 0]


@pytest.mark.parametrize("lora", [(), ("model.lora.rank=4",)], ids=["full", "lora"])
def test_divergence_from_the_reference_starts_at_zero_and_grows(bed: Bed, lora: tuple[str, ...]):
    rows = steps_of(bed, "algorithm.kl_coef=0.1", "train.lr=5e-3", *lora)
    first, *later = [row["actor/kl_loss"] for row in rows]
    assert first == 0.0
    assert min(later) > 1e-5


def test_reference_stays_that_of_the_start_after_a_resume(bed: Bed):
    options = ("algorithm.kl_coef=0.1", "train.lr=5e-3", "eval.data=null", "checkpoint.every=1")
    run_rl(bed.config(*options, "steps=4", name="reference"))
    run_rl(bed.config(*options, "steps=2"))
    run_rl(bed.config(*options, "steps=4"), resume=True)
    resumed, reference = metrics(bed.run_dir()), metrics(bed.run_dir("reference"))
    assert [row["actor/kl_loss"] for row in resumed] == [row["actor/kl_loss"] for row in reference]


def test_a_penalty_on_divergence_keeps_the_policy_near_the_reference(bed: Bed):
    options = ("steps=8", "train.lr=5e-3")
    free = steps_of(bed, *options, "algorithm.kl_coef=1e-6", name="free")
    tied = steps_of(bed, *options, "algorithm.kl_coef=10", name="tied")
    assert tied[-1]["actor/kl_loss"] < 0.5 * free[-1]["actor/kl_loss"]


def test_decoupled_objective_weighs_nothing_while_the_sampler_is_the_policy(bed: Bed):
    options = ("steps=1", "train.lr=1e-3")
    plain = steps_of(bed, *options, name="plain")
    decoupled = steps_of(
        bed, *options, "algorithm.corrections=[{method: decoupled_cap}]", name="decoupled"
    )
    assert decoupled[0]["actor/grad_norm"] == pytest.approx(plain[0]["actor/grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    "options",
    [("algorithm.policy_loss=clip_cov",), ("model.lora.rank=4", "model.lora.dropout=0.5")],
    ids=["random selection", "dropout"],
)
def test_what_is_drawn_at_random_is_a_function_of_the_seed(bed: Bed, options: tuple[str, ...]):
    first, second = (
        [row["actor/grad_norm"] for row in steps_of(bed, "steps=2", *options, name=name)]
        for name in ("first", "second")
    )
    assert first == second


def test_minibatches_and_epochs_multiply_the_optimizer_steps(bed: Bed):
    options = ("steps=2", "rollout.group_size=8", "train.schedule=linear", "train.min_lr_ratio=0")
    whole = steps_of(bed, *options, name="whole")
    parts = steps_of(bed, *options, "algorithm.minibatches=2", "algorithm.epochs=2", name="parts")
    # Linear decay over 2 optimizer steps, and over 8; a step's rate is the mean of its own.
    assert [row["actor/lr"] for row in whole] == pytest.approx([1e-3, 0.5e-3])
    assert [row["actor/lr"] for row in parts] == pytest.approx(
        [1e-3 * (8 + 7 + 6 + 5) / 32, 1e-3 * (4 + 3 + 2 + 1) / 32]
    )
    assert [row["actor/num_rows"] for row in whole] == [32, 32]
    assert [row["actor/num_rows"] for row in parts] == [16, 16]
    # The first optimizer step is on policy, the others of the same batch are not.
    assert whole[0]["actor/ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert abs(parts[0]["actor/ppo_kl"]) > 1e-4


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_every_policy_loss_trains_through_the_engines(bed: Bed, name: str):
    (row,) = steps_of(bed, "steps=1", f"algorithm.policy_loss={name}")
    assert row["actor/update_successful"] == 1
    assert row["actor/grad_norm"] > 0


@pytest.mark.parametrize("stale_policy", ["drop", "mask", "wait"])
def test_asynchronous_batches_obey_the_staleness_bound(bed: Bed, stale_policy: str):
    rows = steps_of(
        bed, "steps=6", "rollout.max_staleness=2", f"rollout.stale_policy={stale_policy}"
    )
    assert max(row["staleness/max"] for row in rows) <= 2
    assert rows[0]["staleness/max"] == 0


def test_entropy_bonus_and_masking_of_truncated_samples(bed: Bed):
    rows = steps_of(bed, "algorithm.entropy_coef=0.01", "algorithm.mask_truncated=true", "steps=2")
    assert all(row["actor/entropy"] > 0 for row in rows)


@pytest.mark.parametrize("mode", ["inprocess", "process"])
def test_a_tokenizer_elsewhere_serves_warm_up_and_generation(bed: Bed, warmed: Warmed, mode: str):
    model, tokenizer = bed.folder / "bare", bed.folder / "tokenizer"
    shutil.copytree(warmed.model, tokenizer)
    shutil.copytree(warmed.model, model, ignore=shutil.ignore_patterns("*token*"))
    rows = steps_of(
        bed,
        "steps=1",
        f"model.path={model}",
        f"model.tokenizer_path={tokenizer}",
        f"inference.mode={mode}",
        f"warmup.data.path={bed.settings['data']['path']}",
        "warmup.data.source=jsonl",
        "warmup.max_length=16",
        "warmup.steps=1",
        "rollout.generation.stop=[A]",
    )
    assert rows[0]["actor/update_successful"] == 1


WORKFLOW = """
import torch

from tandem.rollout import RolloutWorkflow
from tandem.types import LLMRequest


class Echo(RolloutWorkflow):
    def __init__(self, generation, tokenizer):
        self.generation = generation

    async def arun_episode(self, engine, data):
        from tensordict import TensorDict

        prompt = list(data["prompt_ids"])
        made = await engine.agenerate(LLMRequest(data.uid, prompt, self.generation))
        ids = prompt + made.output_tokens
        sampled = torch.arange(len(ids)) >= len(prompt)
        return TensorDict(
            {
                "input_ids": torch.tensor([ids]),
                "attention_mask": torch.ones(1, len(ids), dtype=torch.bool),
                "loss_mask": sampled[None],
                "logprobs": torch.tensor([[0.0] * len(prompt) + made.output_logprobs]),
                "versions": torch.tensor([[-1] * len(prompt) + made.output_versions]),
                "rewards": torch.tensor([float(data.episode_id % 2)]),
            },
            batch_size=[1],
        )
"""


def test_a_users_workflow_trains_with_the_rows_that_the_contract_asks_for(bed: Bed):
    path = bed.folder / "workflow.py"
    path.write_text(WORKFLOW)
    (row,) = steps_of(
        bed,
        "steps=1",
        f"rollout.workflow={path}:Echo",
        "rollout.generation.temperature=0.5",
        "algorithm.advantage=reinforce",
    )
    assert row["actor/update_successful"] == 1
    assert row["mismatch/same_version_max"] < 1e-4


def test_scripted_engine_drives_the_loop(bed: Bed):
    rows = steps_of(
        bed,
        "inference.backend=scripted",
        "steps=2",
        "algorithm.corrections=[{method: decoupled_cap}]",
    )
    assert [row["actor/update_successful"] for row in rows] == [1, 1]
    assert all("reward/mean" in row for row in rows)


def test_a_sharded_engine_without_a_launcher_gives_the_run_of_the_local_one(bed: Bed):
    local, sharded = (
        [row["actor/grad_norm"] for row in steps_of(bed, "steps=2", *options, name=name)]
        for name, options in (("local", ()), ("sharded", ("train.backend=fsdp",)))
    )
    assert sharded == pytest.approx(local, rel=1e-4)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_engine_that_ranks_cannot_share_is_refused_under_a_launcher(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, rank: str
):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CapabilityError, match=r"train.backend: got 'local'.* 2 were started"):
        run_rl(bed.config())
    assert not bed.run_dir().exists()


def test_remax_learns_from_the_difference_to_a_greedy_completion(bed: Bed):
    rows = steps_of(bed, "algorithm.advantage=remax", "steps=2", "rollout.group_size=1",
                    "rollout.min_group_size=1")  # fmt: skip
    assert all(row["actor/grad_norm"] > 0 for row in rows if row["actor/pg_loss"])
    # One completion a prompt is trained on; the greedy one is not.
    from tandem.rollout.encoding import unpack_rows
    from tandem.store import STORE_FILE, SqliteStore

    store = SqliteStore(bed.run_dir() / STORE_FILE, read_only=True)
    trained = [item for item in store.find() if item.step is not None]
    assert len(trained) == 8
    for item in trained:
        kept = unpack_rows(store.content(item.key).rows, episode_id=0, attempt=0)
        assert len(kept) == 1
        assert float(kept["greedy_rewards"][0]) in (0.0, 1.0)
    store.close()


PARTS = (
    "rollout.reward={parts: {right: {name: exact_match}, near: {name: contains_answer}}, "
    "weights: {near: 0.5}}"
)


def test_gdpo_sees_every_part_of_the_reward(bed: Bed):
    rows = steps_of(bed, PARTS, "algorithm.advantage=gdpo", "steps=2")
    for row in rows:
        total = row["reward/part/right"] + 0.5 * row["reward/part/near"]
        assert row["reward/mean"] == pytest.approx(total, abs=1e-6)
    assert max(row["actor/grad_norm"] for row in rows) > 0


def test_parts_are_one_reward_for_other_algorithms(bed: Bed):
    (row,) = steps_of(bed, PARTS, "steps=1")
    assert 0 <= row["reward/part/right"] <= row["reward/mean"] <= 1.5


def test_interpolated_ratios_need_no_pass_and_start_from_the_sampler_when_it_is_fresh(bed: Bed):
    options = ("algorithm.minibatches=2", "steps=2", "algorithm.corrections=[{method: tis}]")
    exact = steps_of(bed, *options, name="exact")
    rows = steps_of(bed, *options, "algorithm.prox=loglinear", name="interpolated")
    # Synchronous: every token is of the version that is trained from, so nothing is estimated.
    for found, expected in zip(rows, exact, strict=True):
        assert found["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-4)
        assert "mismatch/kl" not in found
        assert found["behaviour/weight_mean"] == pytest.approx(1.0, abs=1e-5)


def test_interpolation_is_refused_where_the_exact_values_are_needed(bed: Bed):
    for option in (
        "algorithm.policy_loss=clip_cov",
        "algorithm.corrections=[{method: veto}]",
        "algorithm.corrections=[{method: tis, kwargs: {normalise: true}}]",
    ):
        with pytest.raises(ConfigError, match="loglinear"):
            bed.config("algorithm.prox=loglinear", option)


@pytest.mark.parametrize(
    ("advantage", "option", "message"),
    [
        ("remax", "reward_model={path: m}", "remax cannot use the section reward_model"),
        ("gdpo", "steps=1", "gdpo needs rollout.reward.parts"),
        ("gdpo", "algorithm.shaping.truncated_reward=0", "changes the sum"),
    ],
)
def test_what_an_algorithm_cannot_see_is_refused(bed: Bed, advantage, option, message):
    parts = (PARTS,) if message == "changes the sum" else ()
    with pytest.raises(ConfigError, match=message):
        bed.config(f"algorithm.advantage={advantage}", option, *parts)
