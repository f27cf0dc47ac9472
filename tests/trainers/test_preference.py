"""Batches of preferences: the reference, the baseline of KTO, and cuts that change nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.config import DPOStageConfig, LoraConfig, RewardStageConfig, TinyModelConfig
from tandem.data.demonstrations import Demonstration
from tandem.errors import ConfigError
from tandem.models.tiny import save_tiny_model
from tandem.trainers.preference import KTOStage, PairStage, mismatched
from tandem.trainers.reference import logprob_sums
from tandem.trainers.reward_model import RewardStage

LETTERS = "abcdefgh"
ROWS = [
    {"prompt": "ab", "chosen": "cde", "rejected": "h"},
    {"prompt": "c", "chosen": "d", "rejected": "gg"},
    {"prompt": "fgh", "chosen": "ab", "rejected": "ba"},
    {"prompt": "d", "chosen": "ef", "rejected": "eff"},
]
TINY = TinyModelConfig(
    alphabet=LETTERS,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=48,
    max_position=32,
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(TINY, tmp_path_factory.mktemp("tiny") / "model", seed=3))


@pytest.fixture
def open_stage(tmp_path: Path, model_path: str) -> Any:
    made = []

    def build(
        kind: type[Any] = PairStage,
        *,
        rows: list[dict[str, Any]] = ROWS,
        train: dict[str, Any] | None = None,
        lora: LoraConfig | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> Any:
        path = tmp_path / "pairs.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config_class = RewardStageConfig if kind is RewardStage else DPOStageConfig
        config = config_class(
            data={"source": "jsonl", "path": str(path), "shuffle": False},
            batch_size=4,
            max_length=16,
            train={"lr": 1e-2, "device": "cpu", "max_grad_norm": None, **(train or {})},
            **settings,
        )
        stage = kind(config, model_path, seed=seed, lora=lora)
        made.append(stage)
        return stage

    yield build
    for stage in made:
        stage.close()


def gradients(stage: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in stage.engine.parameters().items()}


def run_backward(stage: Any) -> tuple[float, dict[str, torch.Tensor]]:
    batch = stage.make_batch(stage.data.all())
    stage.engine.optimizer_zero_grad()
    loss = stage.engine.forward_backward_batch(batch, stage.loss).loss
    return loss, gradients(stage)


# --- the reference --------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["full", "lora"])
def test_the_reference_is_the_initial_policy_before_and_after_training(
    open_stage: Any, lora: LoraConfig | None
) -> None:
    stage = open_stage(lora=lora)
    pairs = stage.data.all()
    before = stage.make_batch(pairs)
    start = logprob_sums(stage.engine, before)
    torch.testing.assert_close(before["ref_logprob_sums"], start, rtol=0, atol=1e-5)
    first = stage.run_step()
    assert first["dpo/loss"] == pytest.approx(math.log(2), abs=1e-5)
    for _ in range(3):
        stage.run_step()
    after = stage.make_batch(pairs)
    assert torch.equal(after["ref_logprob_sums"], before["ref_logprob_sums"])
    assert (logprob_sums(stage.engine, after) - start).abs().max() > 0.1


def test_a_policy_that_starts_from_an_adapter_has_it_as_reference(
    open_stage: Any, tmp_path: Path
) -> None:
    """B114: no divergence at step 0."""
    from tandem.types import SaveLoadMeta

    first = open_stage(lora=LoraConfig(rank=2))
    first.run_step()
    first.run_step()
    first.engine.save(SaveLoadMeta(str(tmp_path / "adapter"), weight_format="adapter"))
    stage = open_stage(lora=LoraConfig(adapter_path=str(tmp_path / "adapter")))
    batch = stage.make_batch(stage.data.all())
    moved = logprob_sums(first.engine, batch)
    torch.testing.assert_close(batch["ref_logprob_sums"], moved, rtol=0, atol=1e-5)
    assert stage.run_step()["preference/margin"] == pytest.approx(0.0, abs=1e-5)


def test_a_reference_computed_beforehand_gives_the_same_numbers(open_stage: Any) -> None:
    now, before = open_stage(), open_stage(reference="precompute")
    assert before._reference is None
    for _ in range(3):
        one, other = now.run_step(), before.run_step()
        assert one["dpo/loss"] == pytest.approx(other["dpo/loss"], abs=1e-5)
    pairs = now.data.all()
    sums = now.make_batch(pairs)["ref_logprob_sums"].view(-1, 2).tolist()
    known = [
        {**row, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        for row, (chosen, rejected) in zip(ROWS, sums, strict=True)
    ]
    columns = open_stage(rows=known, reference="columns")
    assert columns.make_batch(columns.data.all())["ref_logprob_sums"].tolist() == pytest.approx(
        before.make_batch(before.data.all())["ref_logprob_sums"].tolist(), abs=1e-5
    )


def test_a_loss_without_a_reference_opens_no_second_model(open_stage: Any) -> None:
    stage = open_stage(loss="orpo")
    assert stage._reference is None
    assert "ref_logprob_sums" not in stage.make_batch(stage.data.all()).keys()  # noqa: SIM118


# --- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (PairStage, {"loss": "sigmoid", "sft_coef": 0.5}),
        (PairStage, {"loss": "ipo"}),
        (PairStage, {"loss": "simpo"}),
        (PairStage, {"loss": "orpo"}),
        (KTOStage, {"loss": "kto"}),
        (RewardStage, {"center_coef": 0.1}),
    ],
    ids=["sigmoid", "ipo", "simpo", "orpo", "kto", "reward"],
)
def test_a_cut_into_micro_batches_changes_no_gradient(
    open_stage: Any, kind: type[Any], settings: dict[str, Any]
) -> None:
    whole = open_stage(kind, **settings)
    cut = open_stage(kind, **settings, train={"microbatch_size": 1})
    loss, expected = run_backward(whole)
    cut_loss, found = run_backward(cut)
    num_items = len(cut.data)
    batch = cut.make_batch(cut.data.all())
    result = cut.engine.train_batch(batch, cut.loss)
    assert result["num_microbatches"] == num_items
    assert cut_loss == pytest.approx(loss, abs=1e-5)
    scale = sum(float(g.square().sum()) for g in expected.values()) ** 0.5
    assert max(float((found[n] - g).abs().max()) for n, g in expected.items()) < 2e-5 * scale


def test_every_pair_of_a_step_weighs_the_same(open_stage: Any) -> None:
    stage = open_stage()
    batch = stage.make_batch(stage.data.all()[:3])
    assert batch["loss_weights"].tolist() == pytest.approx([1 / 3] * 6)
    assert batch["pair_ids"].tolist() == [0, 0, 1, 1, 2, 2]
    assert batch["is_chosen"].tolist() == [True, False] * 3


def test_margins_reach_the_reward_loss(open_stage: Any) -> None:
    with_margins = open_stage(RewardStage, rows=[{**row, "margin": 2.0} for row in ROWS])
    without = open_stage(RewardStage)
    batch = with_margins.make_batch(with_margins.data.all())
    assert batch["margins"].tolist() == [2.0] * 8
    scores = without.engine.forward(without.make_batch(without.data.all()))["scores"]
    gaps = (scores[0::2] - scores[1::2]).tolist()
    expected = sum(math.log(1 + math.exp(-(gap - 2.0))) for gap in gaps) / 4
    assert with_margins.run_step()["reward_model/loss"] == pytest.approx(expected, abs=1e-5)


# --- kto ------------------------------------------------------------------------------------------


def test_mismatched_rows_have_one_prompt_and_the_others_response() -> None:
    row = Demonstration((1, 2, 3, 4), (False, False, True, True))
    other = Demonstration((5, 6, 7, 8), (False, True, True, True))
    assert mismatched(row, other, 16) == Demonstration(
        (1, 2, 6, 7, 8), (False, False, True, True, True)
    )
    assert mismatched(row, other, 3).input_ids == (1, 2, 6)


def test_the_kto_baseline_is_the_mean_divergence_on_mismatched_rows(open_stage: Any) -> None:
    stage = open_stage(KTOStage, loss="kto", beta=0.5)
    items = stage.data.all()[:3]
    assert stage.make_batch(items)["kl_baselines"].tolist() == pytest.approx([0.0] * 3, abs=1e-5)
    for _ in range(4):
        stage.run_step()
    rows = [item.row for item in items]
    total = 0.0
    for row, other in zip(rows, rows[1:] + rows[:1], strict=True):
        start, response = row.loss_mask.index(True), other.loss_mask.index(True)
        ids = torch.tensor([row.input_ids[:start] + other.input_ids[response:]])
        for engine, sign in ((stage.engine, 1.0), (stage._reference._frozen, -1.0)):
            batch = _as_batch(ids)
            total += sign * float(engine.forward(batch)["train_logprobs"][0, start:].sum())
    found = stage.make_batch(items)["kl_baselines"].tolist()
    assert found == pytest.approx([max(0.0, total / 3)] * 3, abs=1e-4)


def test_a_batch_of_one_response_is_refused_for_kto(open_stage: Any) -> None:
    rows = [{"prompt": "a", "completion": "b", "label": True}] * 5
    with pytest.raises(ConfigError, match="batch of one"):
        open_stage(KTOStage, loss="kto", rows=rows)


def _as_batch(ids: torch.Tensor) -> Any:
    from tensordict import TensorDict

    mask = torch.ones_like(ids, dtype=torch.bool)
    return TensorDict({"input_ids": ids, "attention_mask": mask}, batch_size=[1])
