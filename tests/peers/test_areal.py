"""AReaL's own losses, actor and workflow, unchanged, on our engines."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from areal.api.cli_args import (
    GenerationHyperparameters,
    PPOActorConfig,
    RejectionSamplingConfig,
)
from areal.trainer.ppo.actor import PPOActor, grpo_loss_fn
from areal.trainer.sft.lm_engine import LMEngine
from areal.utils.functional import gather_logprobs_entropy
from areal.workflow.rlvr import RLVRWorkflow

from tandem.algorithms.aggregation import loss_weights
from tandem.algorithms.objective import PolicyObjective
from tandem.algorithms.sft import sft_loss
from tandem.compat import areal, areal_1_0
from tandem.compat.alignment import to_next_token
from tandem.config.schema import RolloutConfig
from tandem.rollout import ScriptedInferenceEngine
from tests.peers.conftest import assert_same_gradients, gradients_of, near_policy

CAP = 1.3
"""Of the behaviour weight; low, so that some tokens exceed it."""


def their_batch(batch):
    """As AReaL's actor has it after ``compute_advantages``: everything speaks of the next token."""
    mask = batch["attention_mask"]
    shifted = {
        theirs: to_next_token(batch[ours].float(), mask)
        for theirs, ours in (
            ("loss_mask", "loss_mask"),
            ("logprobs", "logprobs"),
            ("prox_logp", "prox_logprobs"),
            ("advantages", "advantages"),
        )
    }
    return {"input_ids": batch["input_ids"], "attention_mask": mask, **shifted}


def count(rows):
    return rows["loss_mask"].count_nonzero()


def on_logits(loss, temperature):
    """Release 1.0 takes the log-probabilities out of the loss; with logits they belong in it."""

    def call(logits, rows):
        labels = rows["input_ids"].roll(-1)
        logprobs, entropy = gather_logprobs_entropy(logits, labels, temperature)
        return loss(logprobs, entropy, rows)

    return call


OPTIONS = {
    "plain": {},
    "dual clip": {"c_clip": 1.5},
    "decoupled": {
        "use_decoupled_loss": True,
        "rejection_sampling": RejectionSamplingConfig(
            level="token", action="mask", metric="ratio", upper=CAP
        ),
    },
}


def our_objective(name, batch):
    if name == "decoupled":
        weight = (batch["prox_logprobs"] - batch["logprobs"]).exp()
        batch["behaviour_weights"] = torch.where(weight <= CAP, weight, 0.0)
        assert bool(((weight > CAP) & batch["loss_mask"]).any())
    return PolicyObjective(
        policy_kwargs={
            "clip_low": 0.2,
            "clip_high": 0.28,
            "dual_clip": 1.5 if name == "dual clip" else None,
        }
    )


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("gets", ["logits", "logprobs"])
def test_grpo_loss(gets, name, rows, make_engine, batch):
    temperature = 0.8
    engine, ours = make_engine(microbatch_size=rows), make_engine()
    batch["temperature"] = torch.full((4,), temperature)
    near_policy(batch, ours, "prox_logprobs", "logprobs")
    objective = our_objective(name, batch)
    loss = partial(grpo_loss_fn, eps_clip=0.2, eps_clip_higher=0.28, c_clip=None)
    loss = partial(loss, **OPTIONS[name])
    if gets == "logits":
        view, loss = areal.TrainEngine(engine), on_logits(loss, temperature)
    else:
        view = areal_1_0.TrainEngine(engine, temperature=temperature)
    found = view.train_batch(their_batch(batch), loss, count)
    batch["loss_weights"] = loss_weights("token-mean", batch["loss_mask"])
    expected = ours.train_batch(batch, objective)
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6, rel=1e-5)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert_same_gradients(gradients_of(engine), gradients_of(ours))


def actor_config(**changes):
    values = {
        "experiment_name": "peers",
        "trial_name": "one",
        "path": "",
        "ppo_n_minibatches": 1,
        "eps_clip": 0.2,
        "use_decoupled_loss": False,
        "recompute_logprob": True,
        "kl_ctl": 0.0,
        "temperature": 1.0,
        "reward_norm": None,
        "adv_norm": None,
    }
    return PPOActorConfig(**(values | changes))


def trajectories(batch):
    """One dictionary a row, as rollout gives them: here nothing is shifted yet."""
    found = []
    for row, n in enumerate(batch["attention_mask"].sum(1).tolist()):
        fields = {name: batch[name][row : row + 1, :n] for name in ("input_ids", "attention_mask")}
        fields["loss_mask"] = batch["loss_mask"][row : row + 1, :n].int()
        fields["logprobs"] = batch["logprobs"][row : row + 1, :n].clone()
        fields["versions"] = torch.zeros(1, n, dtype=torch.int32)
        fields["rewards"] = torch.tensor([float(row) - 1.5])
        found.append(fields)
    return found


def test_the_actor_drives_the_engine(make_engine, batch):
    engine, ours = make_engine(), make_engine()
    actor = PPOActor(actor_config(), areal_1_0.TrainEngine(engine))
    rows = trajectories(near_policy(batch, ours, "logprobs"))
    own = ours.forward(batch.select("input_ids", "attention_mask"))["train_logprobs"]
    shifted = to_next_token(own, batch["attention_mask"])
    for index, logp in enumerate(actor.compute_logp(rows)):
        n = int(batch["attention_mask"][index].sum())
        torch.testing.assert_close(logp.reshape(-1)[: n - 1], shifted[index, : n - 1])
        rows[index]["prox_logp"] = logp.reshape(1, -1)[:, :n]
    actor.ppo_update(actor.compute_advantages(rows))

    batch["prox_logprobs"] = own
    rewards = torch.arange(4) - 1.5
    batch["advantages"] = rewards[:, None].expand(4, own.shape[1]) * batch["loss_mask"]
    batch["loss_weights"] = loss_weights("token-mean", batch["loss_mask"])
    clip = {"clip_low": 0.2, "clip_high": 0.2}
    found = ours.train_batch(batch, PolicyObjective(policy_kwargs=clip))
    assert found["grad_norm"] > 1e-2
    assert_same_gradients(gradients_of(engine), gradients_of(ours))


def test_the_language_modelling_engine_drives_ours(make_engine, batch):
    engine, ours = make_engine(), make_engine()
    LMEngine(areal_1_0.TrainEngine(engine)).train_lm(trajectories(batch))
    batch["loss_weights"] = loss_weights("token-mean", batch["loss_mask"])
    ours.train_batch(batch, sft_loss)
    assert_same_gradients(gradients_of(engine), gradients_of(ours))


def test_a_critics_loss_gets_values(make_engine, batch):
    engine, ours = make_engine("value_model"), make_engine("value_model")
    view = areal_1_0.TrainEngine(engine)
    data = their_batch(batch)

    def square(values, rows):
        mask = rows["loss_mask"].bool()
        return (values[mask] - rows["advantages"][mask]).square().sum() / mask.sum()

    view.train_batch(data, square, count)
    weights = loss_weights("token-mean", batch["loss_mask"])
    batch["value_loss_weights"] = weights

    def our_square(outputs, rows):
        error = (outputs["values"] - rows["advantages"]).square()
        return (error * rows["value_loss_weights"]).sum(), {}

    our_square.required_outputs = frozenset({"values"})
    ours.train_batch(batch, our_square)
    assert_same_gradients(gradients_of(engine), gradients_of(ours))
    values = view.forward(data)
    assert values.shape == batch["input_ids"].shape


# --- rollout --------------------------------------------------------------------------------------


class Digits:
    """As much of a tokenizer as the workflow needs."""

    eos_token_id = 2
    pad_token_id = 0

    def decode(self, ids):
        return " ".join(str(token) for token in ids)


def reward(prompt, completion, prompt_ids, completion_ids, **data):
    return float(completion_ids[0] == data["answer"])


def test_a_workflow_of_areal_runs_on_the_view():
    config = RolloutConfig(batch_size=2, group_size=1, min_group_size=1, wait_timeout_s=60)
    view = areal.InferenceEngine(
        ScriptedInferenceEngine(config, lambda prompt, seed: [prompt[-1] + 1, 2])
    )
    workflow = RLVRWorkflow(
        reward,
        GenerationHyperparameters(max_new_tokens=8),
        Digits(),
        get_input_ids_fn=lambda data, tokenizer, thinking: [5, data],
        data_extract_prompt_fn=lambda data: data["number"],
    )
    view.initialize(None, None)
    try:
        batch = view.rollout_batch(
            [{"number": 10, "answer": 11}, {"number": 20, "answer": 3}], workflow
        )
    finally:
        view.destroy()
    assert batch["input_ids"].tolist() == [[5, 10, 11, 2], [5, 20, 21, 2]]
    assert batch["rewards"].tolist() == [1.0, 0.0]
    assert batch["loss_mask"].tolist() == [[0, 0, 1, 1], [0, 0, 1, 1]]
