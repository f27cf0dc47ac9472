from __future__ import annotations

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from tandem.compat.verl import BaseEngine, BaseEngineCtx, EngineRegistry
from tandem.compat.verl_batch import select_rows
from tandem.config.schema import LoraConfig, TrainConfig
from tandem.errors import CapabilityError, ConfigError, DataError
from tandem.types import FinetuneSpec
from tests.compat.conftest import LENGTHS, gradients_of
from tests.tolerance import assert_close
from tests.train import reference

CUTS = {
    "one": {},
    "one row each": {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1},
    "three rows each": {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 3},
    "ten tokens each": {"use_dynamic_bsz": True, "max_token_len_per_gpu": 10},
}


def jagged(rows):
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def make_batch(sequences, masks, **settings):
    fields = {"input_ids": jagged(sequences), "loss_mask": jagged(masks)}
    batch = TensorDict(fields, batch_size=[len(sequences)])
    for name, value in settings.items():
        batch.set_non_tensor(name, value)
    return batch


def mean_nll(*, model_output, data, dp_group):
    """verl's convention: the mask rolled back by one, the sum over all ranks' tokens."""
    mask = data["loss_mask"].values().roll(-1)
    loss = -(model_output["log_probs"].values() * mask).sum()
    loss = loss / data["batch_num_tokens"] * data["dp_size"]
    return loss, {
        "rows": data.batch_size[0],
        "lengths": data["input_ids"].offsets().diff().tolist(),
    }


def expected_gradients(path, sequences, masks, temperature=1.0):
    total = sum(int(mask.sum()) for mask in masks)
    rows = [
        {"input_ids": ids, "loss_weights": mask.float() / total}
        for ids, mask in zip(sequences, masks, strict=True)
    ]
    return reference.gradients(reference.load(path), rows, temperature)


# --- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", CUTS)
def test_loss_and_gradients_are_those_of_a_plain_loop(
    cut, make_engine, model_path, sequences, masks
):
    view = BaseEngine(make_engine())
    batch = make_batch(sequences, masks, temperature=0.7, **CUTS[cut])
    found = view.forward_backward_batch(batch, mean_nll)
    loss, expected = expected_gradients(model_path, sequences, masks, 0.7)
    assert_close(sum(found["loss"]), loss, dtype=torch.float32)
    for name, gradient in gradients_of(view.engine).items():
        assert_close(gradient, expected[name])


def test_settings_cut_the_batch(make_engine, sequences, masks):
    view = BaseEngine(make_engine())
    rows = {
        name: view.infer_batch(make_batch(sequences, masks, **cut), mean_nll)["metrics"]
        for name, cut in CUTS.items()
    }
    assert rows["one"]["rows"] == [4]
    assert rows["one row each"]["rows"] == [1, 1, 1, 1]
    assert rows["three rows each"]["rows"] == [3, 1]
    assert rows["three rows each"]["lengths"] == list(LENGTHS)
    assert sum(rows["ten tokens each"]["rows"]) == 4
    assert len(rows["ten tokens each"]["rows"]) == 3


def test_rows_of_a_group_stay_together(make_engine, sequences, masks):
    cut = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1, "force_group_size": 2}
    view = BaseEngine(make_engine())
    assert view.infer_batch(make_batch(sequences, masks, **cut), mean_nll)["metrics"]["rows"] == [
        2,
        2,
    ]


class TwoRanks(BaseEngine):
    """The view of a rank beside one that has more micro-batches and no tokens."""

    def get_data_parallel_size(self):
        return 2

    def _agree_max(self, value):
        return value + 1


@pytest.mark.parametrize("cut", ["three rows each", "ten tokens each"])
def test_gradients_are_summed_over_ranks_where_verl_averages(
    cut, make_engine, model_path, sequences, masks
):
    view = TwoRanks(make_engine())
    batch = make_batch(sequences, masks, **CUTS[cut])
    found = view.forward_backward_batch(batch, mean_nll)
    loss, expected = expected_gradients(model_path, sequences, masks)
    assert_close(sum(found["loss"]), 2 * loss, dtype=torch.float32)
    for name, gradient in gradients_of(view.engine).items():
        assert_close(gradient, expected[name])
    scored = view.infer_batch(batch)["model_output"]["log_probs"]
    assert scored.offsets().diff().tolist() == list(LENGTHS)


def test_train_batch_steps_and_reports_the_gradient_norm(make_engine, sequences, masks):
    view = BaseEngine(make_engine())
    before = {name: p.detach().clone() for name, p in view.engine.model.named_parameters()}
    found = view.train_batch(make_batch(sequences, masks), mean_nll)
    norm = torch.stack([g.square().sum() for g in gradients_of(view.engine).values()]).sum().sqrt()
    assert_close(found["metrics"]["grad_norm"], norm)
    assert any(not torch.equal(p, before[name]) for name, p in view.engine.model.named_parameters())
    assert found["model_output"] == {}


def test_the_callers_batch_is_not_changed(make_engine, sequences, masks):
    batch = make_batch(sequences, masks)
    keys = set(batch.keys())
    BaseEngine(make_engine()).train_batch(batch, mean_nll)
    assert set(batch.keys()) == keys
    assert torch.equal(batch["input_ids"].values(), torch.cat(sequences))


# --- outputs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", CUTS)
def test_log_probs_speak_of_the_next_token(cut, make_engine, model_path, sequences, masks):
    view = BaseEngine(make_engine())
    batch = make_batch(sequences, masks, temperature=0.7, calculate_entropy=True, **CUTS[cut])
    found = view.infer_batch(batch)
    assert found["loss"] == []
    assert set(found["model_output"]) == {"log_probs", "entropy"}
    model = reference.load(model_path)
    for row, ids in zip(found["model_output"]["log_probs"].unbind(), sequences, strict=True):
        expected = reference.logprobs(model, ids, 0.7).detach()
        assert_close(row, torch.cat([expected[1:], torch.zeros(1)]))
    logits = model(sequences[0][None], use_cache=False).logits[0].detach() / 0.7
    p = logits.softmax(-1)
    entropy = -(p * p.log()).sum(-1)
    assert_close(found["model_output"]["entropy"].unbind()[0][:-1], entropy[:-1])


def test_a_temperature_of_each_row(make_engine, model_path, sequences, masks):
    batch = make_batch(sequences, masks)
    batch["temperature"] = torch.tensor([0.5, 1.0, 2.0, 1.5])
    rows = BaseEngine(make_engine()).infer_batch(batch)["model_output"]["log_probs"].unbind()
    expected = reference.logprobs(reference.load(model_path), sequences[2], 2.0)
    assert_close(rows[2][:-1], expected[1:].detach())


def test_padded_rows_give_the_responses_part(make_engine, model_path):
    ids = torch.tensor([[0, 3, 4, 5, 6], [1, 2, 7, 8, 0]])
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
    fields = {"input_ids": ids, "attention_mask": mask, "responses": ids[:, 2:]}
    found = BaseEngine(make_engine()).infer_batch(TensorDict(fields, batch_size=[2]))
    model = reference.load(model_path)
    first = reference.logprobs(model, ids[0, 1:]).detach()
    second = reference.logprobs(model, ids[1, :4]).detach()
    expected = torch.stack([first[1:], torch.cat([second[2:], torch.zeros(1)])])
    assert_close(found["model_output"]["log_probs"], expected)


def test_outputs_come_back_from_training_when_asked_for(make_engine, sequences, masks):
    view = BaseEngine(make_engine())
    batch = make_batch(sequences, masks, return_model_output=True, **CUTS["one row each"])
    found = view.forward_backward_batch(batch, mean_nll)["model_output"]["log_probs"]
    expected = view.infer_batch(batch)["model_output"]["log_probs"]
    assert not found.requires_grad
    assert_close(found.values(), expected.values())


def test_values_speak_of_the_state_after_the_token(make_engine, sequences, masks):
    engine = make_engine("value_model")
    batch = make_batch(sequences, masks, use_dynamic_bsz=False, micro_batch_size_per_gpu=2)
    found = BaseEngine(engine).infer_batch(batch)["model_output"]["values"].unbind()
    extended = [torch.cat([ids, ids[:1]]) for ids in sequences]
    longer = [torch.cat([mask, mask[:1]]) for mask in masks]
    ours = engine.forward(
        TensorDict({"input_ids": jagged(extended), "loss_mask": jagged(longer)}, batch_size=[4])
    )["values"].unbind()
    for theirs, own in zip(found, ours, strict=True):
        assert_close(theirs, own[1:])


def test_scores_of_a_reward_model_are_not_shifted(make_engine, sequences, masks):
    engine = make_engine("reward_model")
    found = BaseEngine(engine).infer_batch(make_batch(sequences, masks))["model_output"]["scores"]
    ours = engine.forward(TensorDict({"input_ids": jagged(sequences)}, batch_size=[4]))["scores"]
    assert_close(found, ours)


def test_positions_of_several_dimensions_are_refused(make_engine, sequences, masks):
    batch = make_batch(sequences, masks)
    batch["position_ids"] = torch.zeros(4, 3, 9, dtype=torch.int64)
    with pytest.raises(CapabilityError, match="position_ids"):
        BaseEngine(make_engine()).infer_batch(batch)


def test_an_incomplete_batch_is_refused(make_engine, sequences, masks):
    view = BaseEngine(make_engine())
    with pytest.raises(DataError, match="input_ids"):
        view.infer_batch(TensorDict({}, batch_size=[2]))
    with pytest.raises(DataError, match="attention_mask"):
        view.infer_batch(TensorDict({"input_ids": torch.ones(2, 3).long()}, batch_size=[2]))
    with pytest.raises(DataError, match="temperature"):
        view.infer_batch(make_batch(sequences, masks, temperature=[1.0, 2.0]))
    with pytest.raises(DataError, match="loss_function"):
        view.forward_backward_batch(make_batch(sequences, masks), None)


def test_selected_rows_share_their_lengths_and_keep_settings(sequences, masks):
    batch = make_batch(sequences, masks, temperature=0.5)
    batch["names"] = NonTensorStack("a", "b", "c", "d")
    rows = select_rows(batch, [2, 0])
    assert rows["temperature"] == 0.5
    assert list(rows["names"]) == ["c", "a"]
    assert torch.equal((rows["input_ids"] * rows["loss_mask"]).unbind()[0], sequences[2] * masks[2])


# --- modes ----------------------------------------------------------------------------------------


def storage(engine):
    return sum(p.untyped_storage().nbytes() for p in engine.model.parameters())


def test_a_mode_brings_back_what_is_offloaded(make_engine, sequences, masks):
    view = BaseEngine(make_engine(offload_params=True, offload_optimizer=True))
    assert view.is_param_offload_enabled
    assert view.is_optimizer_offload_enabled
    for mode in ("train", "eval"):
        assert storage(view.engine) == 0
        with getattr(view, f"{mode}_mode")() as entered:
            assert entered is view
            assert view.mode == mode
            assert view.engine.model.training == (mode == "train")
            assert storage(view.engine) > 0
        assert view.mode is None
    assert storage(view.engine) == 0


def test_offloading_can_be_left_to_the_caller(make_engine):
    view = BaseEngine(make_engine(offload_params=True))
    with view.train_mode(disable_auto_offload=True):
        assert storage(view.engine) == 0
    view.to("device")
    with view.eval_mode(disable_auto_offload=True):
        pass
    assert storage(view.engine) > 0


def test_gradients_end_with_the_training_mode(make_engine, sequences, masks):
    view = BaseEngine(make_engine())
    batch = make_batch(sequences, masks)
    with view.train_mode():
        view.forward_backward_batch(batch, mean_nll)
        assert any(p.grad is not None for p in view.engine.model.parameters())
    assert all(p.grad is None for p in view.engine.model.parameters())
    with view.train_mode(zero_grad_on_exit=False):
        view.forward_backward_batch(batch, mean_nll)
    assert any(p.grad is not None for p in view.engine.model.parameters())


def test_an_error_inside_leaves_everything_offloaded_and_no_gradient(make_engine, sequences, masks):
    view = BaseEngine(make_engine(offload_params=True, offload_grads=True))
    batch = make_batch(sequences, masks, **CUTS["one row each"])

    def fails_at_the_last_row(*, model_output, data, dp_group):
        loss, metrics = mean_nll(model_output=model_output, data=data, dp_group=dp_group)
        1 / int(data["input_ids"].values().shape[0] != LENGTHS[3])
        return loss, metrics

    def call():
        with view.train_mode(zero_grad_on_exit=False):
            view.forward_backward_batch(batch, fails_at_the_last_row)

    with pytest.raises(ZeroDivisionError):
        call()
    assert storage(view.engine) == 0
    assert view.mode is None
    assert all(p.grad is None for p in view.engine.model.parameters())


def test_a_misspelt_option_is_an_error(make_engine):
    view = BaseEngine(make_engine())
    with pytest.raises(ConfigError, match="auto_offload"):
        view.train_mode(auto_offload=False)
    with pytest.raises(ConfigError, match="mode"):
        BaseEngineCtx(view, "training")
    with pytest.raises(ConfigError, match="blocking"):
        view.save_checkpoint("x", blocking=True)


# --- weights and files ----------------------------------------------------------------------------


def test_parameters_are_those_of_the_file(make_engine, model_path):
    view = BaseEngine(make_engine())
    stream, peft = view.get_per_tensor_param()
    expected = reference.load(model_path).state_dict()
    found = dict(stream)
    assert peft is None
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_disabled_adapter_is_the_base_model(make_engine, sequences, masks):
    batch = make_batch(sequences, masks)
    base = BaseEngine(make_engine())
    adapted = BaseEngine(make_engine(lora=LoraConfig(rank=2), lr=0.5))
    with base.disable_adapter():
        expected = base.infer_batch(batch)["model_output"]["log_probs"].values()
    adapted.train_batch(batch, mean_nll)
    adapted.train_batch(batch, mean_nll)
    trained = adapted.infer_batch(batch)["model_output"]["log_probs"].values()
    assert not torch.allclose(trained, expected, atol=1e-3)
    with adapted.disable_adapter():
        found = adapted.infer_batch(batch)["model_output"]["log_probs"].values()
    assert_close(found, expected)


def test_checkpoints_come_back_and_the_oldest_goes(make_engine, sequences, masks, tmp_path):
    view = BaseEngine(make_engine())
    batch = make_batch(sequences, masks)
    for step in (1, 2, 3):
        view.train_batch(batch, mean_nll)
        path = tmp_path / f"global_step_{step}" / "actor"
        view.save_checkpoint(str(path), global_step=step, max_ckpt_to_keep=2)
    expected = {name: p.detach().clone() for name, p in view.engine.model.named_parameters()}
    assert not (tmp_path / "global_step_1" / "actor").exists()
    other = BaseEngine(make_engine())
    other.load_checkpoint(str(tmp_path / "global_step_3" / "actor"))
    for name, parameter in other.engine.model.named_parameters():
        assert torch.equal(parameter, expected[name])
    assert (tmp_path / "global_step_3" / "actor").exists()


# --- registry -------------------------------------------------------------------------------------


def test_the_registry_makes_our_engines(model_path, sequences, masks):
    view = EngineRegistry.new(
        "language_model",
        "local",
        config=TrainConfig(device="cpu", schedule="linear", lr=1.0),
        model_path=model_path,
        ft_spec=FinetuneSpec(1, 4, 1),
    )
    view.initialize()
    assert view.lr_scheduler_step() == pytest.approx(0.75)
    assert (view.get_data_parallel_rank(), view.get_data_parallel_size()) == (0, 1)
    assert view.get_data_parallel_group() is None
    assert view.is_mp_src_rank_with_outputs()
    view.engine.destroy()


def test_the_same_class_is_found_again():
    first = EngineRegistry.get_engine_cls("value_model", "local")
    assert issubclass(first, BaseEngine)
    assert EngineRegistry.get_engine_cls("value_model", "local") is first


def test_own_views_are_registered_once(monkeypatch):
    monkeypatch.setattr(EngineRegistry, "_registered", {})

    @EngineRegistry.register("language_model", ["mine", "ours"], device=["cpu", "cuda"])
    class Mine(BaseEngine):
        pass

    assert EngineRegistry.get_engine_cls("language_model", "ours") is Mine
    with pytest.raises(ConfigError, match="registered already"):
        EngineRegistry.register("language_model", "mine")(Mine)
    with pytest.raises(ConfigError, match="subclass"):
        EngineRegistry.register("language_model", "other")(dict)
    with pytest.raises(ConfigError, match="model_type"):
        EngineRegistry.register("language", "mine")
    with pytest.raises(ConfigError, match="no train engine"):
        EngineRegistry.get_engine_cls("language_model", "nothing")
