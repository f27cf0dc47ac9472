from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from tandem.compat import areal_1_0
from tandem.compat.areal import InferenceEngine, LLMResponse, TrainEngine
from tandem.compat.areal_data import our_request, save_load_meta, weight_update_meta
from tandem.config.schema import RolloutConfig
from tandem.errors import CapabilityError, ConfigError, DataError, RolloutError
from tandem.rollout import ScriptedInferenceEngine
from tandem.types import GenerationConfig, LLMRequest, WeightUpdateMeta
from tandem.weights import publish as send
from tests.compat.conftest import LENGTHS, gradients_of
from tests.tolerance import assert_close
from tests.train import reference

# --- training -------------------------------------------------------------------------------------


def make_batch(sequences, masks):
    """As AReaL's trainer makes it: the loss mask rolled to the position that predicts."""
    pad = torch.nn.utils.rnn.pad_sequence
    attention = pad([torch.ones(n, dtype=torch.bool) for n in LENGTHS], batch_first=True)
    mask = pad([mask.int() for mask in masks], batch_first=True)
    return TensorDict(
        {
            "input_ids": pad(sequences, batch_first=True),
            "attention_mask": attention,
            "loss_mask": mask.roll(-1, dims=1),
            "rewards": torch.arange(4.0),
            "temperature": torch.full((4,), 3.0),
        },
        batch_size=[4],
    )


def cross_entropy(logits, input_):
    labels = input_["input_ids"].roll(-1)
    nll = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return (nll * input_["loss_mask"]).sum() / input_["loss_mask"].sum()


def count(input_):
    return input_["loss_mask"].sum()


@pytest.mark.parametrize("rows", [None, 1, 3])
def test_loss_and_gradients_are_those_of_a_plain_loop(
    rows, make_engine, model_path, sequences, masks
):
    view = TrainEngine(make_engine(microbatch_size=rows))
    total = sum(int(mask.sum()) for mask in masks)
    weighted = [
        {"input_ids": ids, "loss_weights": mask.float() / total}
        for ids, mask in zip(sequences, masks, strict=True)
    ]
    loss, expected = reference.gradients(reference.load(model_path), weighted)
    evaluated = view.eval_batch(make_batch(sequences, masks), cross_entropy, count)
    assert_close(evaluated, torch.tensor(loss))
    found = view.train_batch(make_batch(sequences, masks), cross_entropy, count)
    assert_close(found["loss"], loss, dtype=torch.float32)
    assert found["update_successful"] == 1.0
    for name, gradient in gradients_of(view.engine).items():
        assert_close(gradient, expected[name])


def test_losses_get_the_rows_packed(make_engine, sequences, masks):
    seen = []

    def look(logits, input_):
        seen.append((logits, input_))
        return logits.sum() * 0.0

    batch = make_batch(sequences, masks)
    batch["prompt_logits"] = torch.arange(4.0)[:, None, None].expand(4, 9, 2)
    TrainEngine(make_engine()).eval_batch(batch, look, count)
    ((logits, input_),) = seen
    assert logits.shape == (sum(LENGTHS), 61)
    assert torch.equal(input_["input_ids"], torch.cat(sequences))
    assert input_["cu_seqlens"].tolist() == [0, 7, 11, 20, 25]
    assert input_["max_seqlen"] == 9
    assert input_["prompt_logits"].shape == (sum(LENGTHS), 2)
    assert input_["rewards"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert "attention_mask" not in input_.keys()  # noqa: SIM118
    assert input_.get("prox_logp") is None


@pytest.mark.parametrize("rows", [None, 2])
def test_a_hook_gets_logits_and_its_result_comes_back_padded(
    rows, make_engine, model_path, sequences, masks
):
    def gather(logits, input_):
        labels = input_["input_ids"].roll(-1)
        return logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]

    view = TrainEngine(make_engine(microbatch_size=rows))
    found = view.forward(make_batch(sequences, masks), post_hook=gather)
    assert found.shape == (4, 9)
    model = reference.load(model_path)
    for row, ids in zip(found, sequences, strict=True):
        assert_close(row[: len(ids) - 1], reference.logprobs(model, ids)[1:].detach())


def test_without_a_hook_the_logits_come_back(make_engine, model_path, sequences, masks):
    found = TrainEngine(make_engine()).forward(make_batch(sequences, masks))
    expected = reference.load(model_path)(sequences[1][None], use_cache=False).logits[0]
    assert found.shape == (4, 9, 61)
    assert_close(found[1, :3], expected[:3].detach())


def test_lengths_of_the_results_are_the_hooks(make_engine, sequences, masks):
    def firsts(logits, input_):
        return input_["input_ids"][input_["cu_seqlens"][:-1].long()]

    view = TrainEngine(make_engine(microbatch_size=1))
    found = view.forward(
        make_batch(sequences, masks), output_seqlens=[1, 1, 1, 1], post_hook=firsts
    )
    assert found[:, 0].tolist() == [int(ids[0]) for ids in sequences]
    stacked = view.forward(
        make_batch(sequences, masks), [1, 1, 1, 1], firsts, aggregate_fn=lambda rows: len(rows)
    )
    assert stacked == 4


def test_a_value_models_loss_gets_values_of_the_state_after_each_token(
    make_engine, sequences, masks
):
    engine = make_engine("value_model")
    view = TrainEngine(engine)
    batch = make_batch(sequences, masks)
    ours = engine.forward(batch.select("input_ids", "attention_mask"))
    found = view.forward(batch)
    for row, n in enumerate(LENGTHS):
        assert_close(found[row, : n - 1], ours["values"][row, 1:n])
        assert_close(found[row, n - 1], ours["bootstrap_values"][row])

    def square(values, input_):
        return (values * input_["loss_mask"]).square().sum() / input_["loss_mask"].sum()

    mask = batch["loss_mask"] * batch["attention_mask"]
    expected = (found * mask).square().sum() / mask.sum()
    assert_close(view.train_batch(batch, square, count)["loss"], expected, dtype=torch.float32)


def test_a_plain_dictionary_will_do(make_engine, sequences, masks):
    view = TrainEngine(make_engine())
    batch = make_batch(sequences, masks)
    expected = view.eval_batch(batch, cross_entropy, count)
    assert view.eval_batch(dict(batch.items()), cross_entropy, count) == expected
    with pytest.raises(DataError, match="attention_mask"):
        view.eval_batch({"input_ids": batch["input_ids"]}, cross_entropy, count)


def test_life_cycle_and_files(make_engine, tmp_path):
    view = TrainEngine(make_engine(schedule="linear"))
    view.initialize(None, SimpleNamespace(total_train_epochs=1, dataset_size=4, train_batch_size=2))
    assert view.train().engine.model.training
    assert not view.eval().engine.model.training
    assert view.parallelism_group is None
    assert view.get_scheduling_config().gpu == 0
    assert view.get_param_specs() == view.engine.get_param_specs()
    view.set_version(4)
    assert view.get_version() == 4
    rate = view.engine.learning_rate
    view.step_lr_scheduler()
    assert view.engine.learning_rate < rate
    meta = TheirSaveLoadMeta(str(tmp_path / "model"))
    view.save(meta)
    view.load(meta)
    with pytest.raises(ConfigError, match="naive_distributed"):
        save_load_meta(TheirSaveLoadMeta("x", naive_distributed=True))
    view.destroy()


@dataclass
class TheirSaveLoadMeta:
    path: str
    weight_format: str = "hf"
    with_optim: bool = False
    tokenizer: object = None
    base_model_path: str | None = None
    naive_distributed: bool = False


# --- rollout --------------------------------------------------------------------------------------


@dataclass
class TheirGeneration:
    n_samples: int = 1
    max_new_tokens: int = 8
    top_k: int = 100_000_000
    temperature: float = 1.0
    stop_token_ids: list[int] = field(default_factory=list)
    use_beam_search: bool = False


class Echo:
    """A workflow written for AReaL: integer masks, one row, nothing that only we know."""

    def __init__(self, reject=()):
        self.engines, self.reject = [], set(reject)

    async def arun_episode(self, engine, data):
        assert isinstance(data, dict)
        self.engines.append(engine)
        if data["n"] in self.reject:
            return None
        req = SimpleNamespace(
            rid=f"r{data['n']}", input_ids=[5, 10 + data["n"]], gconfig=TheirGeneration()
        )
        resp = await engine.agenerate(req)
        row = {
            "input_ids": resp.input_tokens + resp.output_tokens,
            "loss_mask": [0] * resp.input_len + [1] * resp.output_len,
            "versions": [-1] * resp.input_len + resp.output_versions,
        }
        rows = {name: torch.tensor([values], dtype=torch.int32) for name, values in row.items()}
        rows["attention_mask"] = torch.ones_like(rows["input_ids"], dtype=torch.bool)
        rows["logprobs"] = torch.tensor([[0.0] * resp.input_len + resp.output_logprobs])
        rows["rewards"] = torch.tensor([float(data["n"])])
        return TensorDict(rows, batch_size=[1])


def script(prompt, seed):
    return [prompt[1] + 1, 2]


@pytest.fixture
def rollout():
    config = RolloutConfig(
        batch_size=2, max_staleness=1, group_size=1, min_group_size=1, wait_timeout_s=20
    )
    view = InferenceEngine(ScriptedInferenceEngine(config, script))
    view.initialize(None, None)
    yield view
    view.destroy()


def test_workflows_of_areal_run_on_the_view(rollout):
    workflow = Echo()
    assert rollout.submit({"n": 1}, workflow) is None
    rollout.submit({"n": 2}, workflow)
    batch = rollout.wait(2, timeout=20)
    assert batch["rewards"].tolist() == [1.0, 2.0]
    assert batch["input_ids"].tolist() == [[5, 11, 12, 2], [5, 12, 13, 2]]
    assert batch["loss_mask"].tolist() == [[0, 0, 1, 1], [0, 0, 1, 1]]
    assert (1 - batch["loss_mask"]).sum() == 4
    assert batch["versions"].tolist() == [[-1, -1, 0, 0], [-1, -1, 0, 0]]
    assert workflow.engines == [rollout, rollout]


def test_a_loader_that_yields_lists_is_flattened_and_goes_on(rollout):
    loader = [[{"n": 1}, {"n": 2}, {"n": 3}], [{"n": 4}]]
    workflow = Echo()
    seen = []
    for version in (0, 1, 2):
        batch = rollout.prepare_batch(loader, workflow)
        seen += batch["rewards"].tolist()
        publish(rollout, version + 1)
    assert sorted(seen[:4]) == [1.0, 2.0, 3.0, 4.0]
    assert len(seen) == 6


def test_episodes_of_a_batch_come_in_their_order(rollout):
    batch = rollout.rollout_batch([{"n": n} for n in (3, 1, 2)], Echo(reject=[1]))
    assert batch["rewards"].tolist() == [3.0, 2.0]


def test_a_filter_sees_areals_rows(rollout):
    seen = []

    def accept(rows):
        seen.append(int((1 - rows["loss_mask"]).sum()))
        return float(rows["rewards"]) > 1

    for n in (1, 2, 3):
        rollout.submit({"n": n}, Echo())
    batch = rollout.wait(2, 20, accept)
    assert batch["rewards"].tolist() == [2.0, 3.0]
    assert seen == [2, 2, 2]


def test_a_rejected_episode_is_not_waited_for(rollout):
    rollout.submit({"n": 1}, Echo(reject=[1]))
    with pytest.raises(RolloutError, match="no longer"):
        rollout.wait(1, 20)


def test_rows_without_ids_fail(rollout):
    class Bad:
        async def arun_episode(self, engine, data):
            return {"rewards": torch.zeros(1)}

    with pytest.raises(RolloutError, match="input_ids"):
        rollout.rollout_batch([{"n": 1}], Bad())


def test_paused_means_that_nothing_starts(rollout):
    rollout.pause()
    rollout.submit({"n": 1}, Echo())
    with pytest.raises(TimeoutError):
        rollout.wait(1, timeout=0.05)
    rollout.resume()
    assert rollout.wait(1, timeout=20)["rewards"].tolist() == [1.0]


def publish(rollout, version):
    """One update from a trainer's view with as much of a meta as AReaL gives."""
    meta = weight_update_meta(SimpleNamespace(type="inprocess"), version)
    future = rollout.update_weights(meta)
    send(meta, [], [])
    future.result(20)
    rollout.set_version(version)


def test_weights_travel_between_the_two_views(make_engine, rollout, tmp_path):
    trainer = TrainEngine(make_engine())
    meta = SimpleNamespace(type="disk", path=tmp_path / "weights", alloc_mode=None)
    for version in (1, 2):
        future = rollout.update_weights(meta)
        trainer.upload_weights(meta)
        future.result(20)
        trainer.set_version(version)
        rollout.set_version(version)
        assert rollout.get_version() == trainer.get_version() == version


def test_responses_know_their_lengths(rollout):
    req = LLMRequest("a", (5, 20), GenerationConfig(max_new_tokens=4))
    response = asyncio.run(rollout.agenerate(req))
    assert isinstance(response, LLMResponse)
    assert (response.input_len, response.output_len) == (2, 2)
    assert response.stop_reason == "stop"


# --- release 1.0 ----------------------------------------------------------------------------------


def nll_of_logprobs(logprobs, entropy, rows):
    assert isinstance(rows, dict)
    assert entropy.shape == logprobs.shape == rows["input_ids"].shape
    return -(logprobs * rows["loss_mask"]).sum() / rows["loss_mask"].sum()


def test_losses_of_release_1_0_get_log_probabilities(make_engine, sequences, masks):
    temperature = 0.7
    view = areal_1_0.TrainEngine(make_engine(), temperature=temperature)
    batch = make_batch(sequences, masks)
    expected = TrainEngine(make_engine()).eval_batch(
        batch, lambda logits, rows: cross_entropy(logits / temperature, rows), count
    )
    assert_close(view.eval_batch(batch, nll_of_logprobs, count), expected)
    assert_close(
        view.train_batch(batch, nll_of_logprobs, count)["loss"], expected, dtype=torch.float32
    )


def test_trajectories_may_come_one_by_one(make_engine, model_path, sequences, masks):
    view = areal_1_0.TrainEngine(make_engine())
    batch = make_batch(sequences, masks)
    rows = [
        {name: batch[name][row : row + 1, :n] for name in ("input_ids", "attention_mask")}
        | {"loss_mask": batch["loss_mask"][row : row + 1, :n]}
        for row, n in enumerate(LENGTHS)
    ]
    assert_close(
        view.eval_batch(rows, nll_of_logprobs, count),
        view.eval_batch(batch, nll_of_logprobs, count),
    )
    model = reference.load(model_path)
    for found, ids in zip(view.forward(rows), sequences, strict=True):
        assert found.shape == (1, len(ids))
        assert_close(found[0, :-1], reference.logprobs(model, ids)[1:].detach())


def test_release_1_0_has_no_reward_models(make_engine, sequences, masks):
    view = areal_1_0.TrainEngine(make_engine("reward_model"))
    with pytest.raises(CapabilityError, match="reward"):
        view.forward_batch(make_batch(sequences, masks))


def test_names_of_release_1_0(make_engine, rollout, tmp_path):
    view = areal_1_0.TrainEngine(make_engine(schedule="linear"))
    assert (view.data_parallel_rank, view.data_parallel_world_size) == (0, 1)
    assert view.data_parallel_group is None
    assert view.is_data_parallel_head()
    rate = view.engine.learning_rate
    view.lr_scheduler_step()
    assert view.engine.learning_rate < rate
    view.optimizer_zero_grad()
    meta = SimpleNamespace(type="disk", path=tmp_path / "weights")
    future = rollout.update_weights(meta)
    view.update_weights(meta)
    future.result(20)
    assert rollout.get_version() == 1


# --- metadata -------------------------------------------------------------------------------------


def test_a_request_is_read_by_its_attributes():
    theirs = SimpleNamespace(
        rid="x", input_ids=torch.tensor([1, 2]), gconfig=TheirGeneration(stop_token_ids=[3])
    )
    ours = our_request(theirs)
    assert ours.input_ids == (1, 2)
    assert ours.gconfig == GenerationConfig(max_new_tokens=8, stop_token_ids=(3,))
    theirs.image_data = ["a picture"]
    with pytest.raises(ConfigError, match="image_data"):
        our_request(theirs)
    theirs.image_data = None
    theirs.gconfig.use_beam_search = True
    with pytest.raises(ConfigError, match="use_beam_search"):
        our_request(theirs)


def test_an_update_without_version_is_the_next_one():
    assert weight_update_meta(SimpleNamespace(type="disk", path="/x"), 7).version == 7
    theirs = SimpleNamespace(type="disk", path="/x", version=3)
    ours = weight_update_meta(theirs, 7)
    assert ours == WeightUpdateMeta("disk", 3, incarnation=ours.incarnation, path="/x")
    assert weight_update_meta(ours, 9) is ours
    with pytest.raises(ConfigError, match="use_lora"):
        weight_update_meta(SimpleNamespace(type="disk", use_lora=True), 7)
    with pytest.raises(ConfigError, match="xccl"):
        weight_update_meta(SimpleNamespace(type="xccl"), 7)
