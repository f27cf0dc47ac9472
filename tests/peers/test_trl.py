"""TRL's own GRPO and DPO trainers beside our engine, on the same model and the same rows."""

from __future__ import annotations

import datasets
import pytest
import torch
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

from tandem.algorithms.advantages.grpo import grpo
from tandem.algorithms.aggregation import loss_weights
from tandem.algorithms.objective import PolicyObjective
from tandem.algorithms.preference_objective import PairObjective
from tandem.config.schema import TinyModelConfig, TrainConfig
from tandem.data.batch import collate
from tandem.models.loading import load_tokenizer
from tandem.models.tiny import save_tiny_model
from tandem.train import EngineRegistry
from tandem.types import FinetuneSpec

STEPS = 3
LR = 2e-2
EPS = 1e-2
"""Large, so that Adam's first steps don't blow up the rounding of gradients that are almost 0."""

TEMPERATURE = 0.9
TOLERANCE = {"rel": 1e-4, "abs": 1e-5}
"""What the first step must agree to; later steps also show that old and reference policy do."""

COMMON = {
    "use_cpu": True,
    "bf16": False,
    "learning_rate": LR,
    "adam_epsilon": EPS,
    "lr_scheduler_type": "constant",
    "max_steps": STEPS,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "gradient_checkpointing": False,
    "max_grad_norm": 0.5,
    "disable_tqdm": True,
    "model_init_kwargs": {"dtype": "float32"},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    config = TinyModelConfig(
        hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=64
    )
    return str(save_tiny_model(config, tmp_path_factory.mktemp("model") / "tiny", seed=0))


@pytest.fixture
def engine(model_dir):
    config = TrainConfig(device="cpu", lr=LR, eps=EPS, max_grad_norm=0.5, microbatch_size=4)
    engine = EngineRegistry.new("language_model", "local", config=config, model_path=model_dir)
    engine.initialize(ft_spec=FinetuneSpec(1, STEPS, 1))
    yield engine
    engine.destroy()


def recording(trainer_class):
    """A trainer that keeps what its loss was given and gave."""

    class Recording(trainer_class):
        def _compute_loss(self, model, inputs, *args, **kwargs):
            result = super()._compute_loss(model, inputs, *args, **kwargs)
            loss = result[0] if isinstance(result, tuple) else result
            self.seen.append((inputs, float(loss.detach())))
            return result

    Recording.seen = []
    return Recording


def run(trainer):
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    losses = [loss for _, loss in trainer.seen]
    assert len(norms) == len(losses) == STEPS
    return [inputs for inputs, _ in trainer.seen], losses, norms


# --- GRPO -----------------------------------------------------------------------------------------


def vowels(completions, **kwargs):
    return [sum(text.count(letter) for letter in "aeiou") + len(text) / 8 for text in completions]


def our_rows(inputs):
    """TRL's prompt and completion, padded towards each other, as rows of ours."""
    rows = []
    for index in range(len(inputs["prompt_ids"])):
        prompt = inputs["prompt_ids"][index][inputs["prompt_mask"][index].bool()]
        kept = inputs["completion_mask"][index].bool()
        completion = inputs["completion_ids"][index][kept]
        ids = torch.cat([prompt, completion])
        rows.append(
            {
                "input_ids": ids,
                "loss_mask": torch.arange(len(ids)) >= len(prompt),
                "advantages": inputs["advantages"][index].expand(len(ids)),
                "temperature": TEMPERATURE,
            }
        )
    return collate(rows)


AGGREGATIONS = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}
OBJECTIVE = PolicyObjective(
    policy_kwargs={"clip_low": 0.2, "clip_high": 0.28},
    kl_coef=0.05,
    kl_estimator="k3",
    kl_gradient="own",
)


def run_grpo(model_dir, path, **options):
    """``STEPS`` steps on one batch of samples, so that the ratio leaves 1."""
    config = GRPOConfig(
        output_dir=str(path),
        per_device_train_batch_size=8,
        num_generations=4,
        num_iterations=STEPS,
        max_completion_length=12,
        beta=0.05,
        epsilon=0.2,
        epsilon_high=0.28,
        temperature=TEMPERATURE,
        seed=7,
        **COMMON,
        **options,
    )
    trainer = recording(GRPOTrainer)(
        model=model_dir,
        reward_funcs=vowels,
        args=config,
        processing_class=load_tokenizer(model_dir),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["1 + 2 =", "ab", "7 * 8 =", "x"]}),
    )
    return run(trainer)


def our_steps(engine, all_inputs, aggregation):
    """The batch of each step: old and reference policy are the engine's before the first."""
    first = None
    for inputs in all_inputs:
        batch = our_rows(inputs)
        weights = loss_weights(aggregation, batch["loss_mask"], horizon=12)
        batch["loss_weights"] = batch["kl_loss_weights"] = weights
        rows = [tuple(row) for row in batch["input_ids"].tolist()]
        if first is None:
            own = engine.forward(batch, outputs=["train_logprobs"])["train_logprobs"]
            first = dict(zip(rows, own, strict=True))
        batch["prox_logprobs"] = batch["ref_logprobs"] = torch.stack([first[row] for row in rows])
        yield batch


@pytest.mark.parametrize("loss_type", AGGREGATIONS)
def test_grpo(loss_type, model_dir, engine, tmp_path):
    all_inputs, losses, norms = run_grpo(
        model_dir, tmp_path, loss_type=loss_type, use_bias_correction_kl=False
    )
    batches = our_steps(engine, all_inputs, AGGREGATIONS[loss_type])
    for batch, loss, norm in zip(batches, losses, norms, strict=True):
        found = engine.train_batch(batch, OBJECTIVE)
        assert found["loss"] == pytest.approx(loss, **TOLERANCE)
        assert found["grad_norm"] == pytest.approx(norm, **TOLERANCE)
    assert norms[0] > 1e-2
    lengths = all_inputs[0]["completion_mask"].sum(1).tolist()
    assert len(set(lengths)) > 1, "rows of one length would not tell the aggregations apart"
    assert abs(losses[-1] - losses[0]) > 1e-3, "the policy must leave the old one"


def test_grpo_weighs_its_kl_term_by_the_ratio_unless_told(model_dir, engine, tmp_path):
    """The documented difference: by default TRL multiplies the k3 of a token by its ratio."""
    all_inputs, losses, norms = run_grpo(model_dir, tmp_path, loss_type="dapo")
    for step, batch in enumerate(our_steps(engine, all_inputs[:2], "token-mean")):
        own = engine.forward(batch, outputs=["train_logprobs"])["train_logprobs"]
        d = (own - batch["ref_logprobs"]) * batch["loss_mask"]
        extra = 0.05 * (batch["kl_loss_weights"] * (torch.exp(-d) - 1 + d) * d.expm1()).sum()
        found = engine.train_batch(batch, OBJECTIVE)
        assert found["loss"] + float(extra) == pytest.approx(losses[step], **TOLERANCE)
        assert step == 0 or abs(float(extra)) > 1e-4
    assert norms[0] > 1e-2


def test_grpo_advantages(model_dir, tmp_path):
    """The same but for eps: TRL adds 1e-4 to the spread of a group, we 1e-6 unless told."""
    rewards = torch.tensor([0.0, 1.0, 1.0, 3.0, 2.0, 2.0, 2.0, 2.0])
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    trainer = recording(GRPOTrainer)(
        model=model_dir,
        reward_funcs=lambda completions, **kwargs: rewards.tolist(),
        args=GRPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=4,
            shuffle_dataset=False,
            **(COMMON | {"max_steps": 1}),
        ),
        processing_class=load_tokenizer(model_dir),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["1", "2"]}),
    )
    trainer.train()
    found = torch.sort(trainer.seen[0][0]["advantages"]).values
    expected = torch.sort(grpo(rewards, groups, eps=1e-4)).values
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    ours = torch.sort(grpo(rewards, groups)).values
    assert float((found - ours).abs().max()) == pytest.approx(1.1e-4, rel=0.05)


# --- DPO ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo"])
def test_dpo(loss_type, model_dir, engine, tmp_path):
    pairs = {
        "prompt": ["1 + 2 =", "ab", "7 * 8 =", "x y"],
        "chosen": [" 3", "cdef", " 56", " z, then"],
        "rejected": [" 4 or 5", "b", " 1", " x"],
    }
    trainer = recording(DPOTrainer)(
        model=model_dir,
        args=DPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            beta=0.3,
            loss_type=[loss_type],
            **COMMON,
        ),
        processing_class=load_tokenizer(model_dir),
        train_dataset=datasets.Dataset.from_dict(pairs),
    )
    all_inputs, losses, norms = run(trainer)
    objective = PairObjective(loss=loss_type, beta=0.3)
    reference = {}
    for step, (inputs, loss, norm) in enumerate(zip(all_inputs, losses, norms, strict=True)):
        batch = pair_rows(inputs)
        rows = [tuple(row) for row in batch["input_ids"].tolist()]
        if step == 0:
            own = engine.forward(batch, outputs=["train_logprobs"])["train_logprobs"]
            sums = (own * batch["loss_mask"]).sum(1)
            reference = dict(zip(rows, sums, strict=True))
        batch["ref_logprob_sums"] = torch.stack([reference[row] for row in rows])
        found = engine.train_batch(batch, objective)
        assert found["loss"] == pytest.approx(loss, **TOLERANCE)
        assert found["grad_norm"] == pytest.approx(norm, **TOLERANCE)


def pair_rows(inputs):
    """TRL's batch has all chosen rows first, then all rejected ones in the same order."""
    count = len(inputs["input_ids"]) // 2
    rows = []
    for index in range(2 * count):
        kept = inputs["attention_mask"][index].bool()
        rows.append(
            {
                "input_ids": inputs["input_ids"][index][kept],
                "loss_mask": inputs["completion_mask"][index][kept].bool(),
                "pair_ids": index % count,
                "is_chosen": index < count,
                "loss_weights": 1.0 / count,
            }
        )
    return collate(rows)
