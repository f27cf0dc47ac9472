"""What the ranks of a sharded engine must do; ``test_fsdp`` runs each on a number of ranks."""

import json
import math
import time

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tandem.config.schema import LoraConfig
from tandem.data.batch import collate
from tandem.errors import (
    CapabilityError,
    CheckpointError,
    DataError,
    EngineError,
    TrainingDiverged,
    WeightSyncError,
)
from tandem.models.heads import scalar_head
from tandem.train import ranks
from tandem.train.shards import local_part
from tandem.types import Metric, SaveLoadMeta, WeightUpdateMeta
from tandem.weights import expect, open_published
from tests.train import reference
from tests.train.conftest import make_rows, nll

LENGTHS = [9, 5, 7, 11, 6, 3, 8]
"""Seven rows: the ranks get different numbers of rows, tokens and micro-batches."""

CUT = {"microbatch_size": 1}

SMOOTH = {"eps": 1e-2}
"""Without it the first update is the sign of the gradient, whatever its size."""


def share(engine, rows):
    """This data-parallel rank's rows."""
    return collate(rows[engine.get_data_parallel_rank() :: engine.get_data_parallel_size()])


def whole_gradients(engine):
    return {name: engine._full_tensor(p.grad).clone() for name, p in engine.parameters().items()}


def whole_weights(engine):
    return {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}


def train(engine, steps, lengths=LENGTHS):
    losses = []
    for step in steps:
        batch = share(engine, make_rows(lengths, seed=step))
        losses.append(engine.train_batch(batch, nll)["loss"])
        engine.lr_scheduler_step()
    return losses


def assert_same_gradients(found, expected, *, rel=1e-5):
    """Largest elementwise difference relative to the norm of the whole gradient."""
    assert found.keys() == expected.keys()
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in expected.values()))
    assert norm > 0
    for name, grad in expected.items():
        assert float((found[name] - grad).abs().max()) <= rel * norm, name


def assert_same_weights(found, expected, atol):
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=atol, msg=name)


def check_against_local(here, model="plain", *, loss=nll, parallel=None, **options):
    """One clipped step gives the loss, gradients, norm and weights of one process."""
    rows = make_rows(LENGTHS)
    options = CUT | SMOOTH | options
    engine = here.engine(model, parallel=parallel, **options)
    plain = engine.forward_backward_batch(share(engine, rows), loss)
    gradients = whole_gradients(engine)
    engine.config = engine.config.model_copy(update={"max_grad_norm": 0.1})
    result = engine.train_batch(share(engine, rows), loss)
    weights = whole_weights(engine)
    if not here.is_first:
        return
    oracle = here.local(model, **options)
    expected = oracle.forward_backward_batch(collate(rows), loss)
    assert plain.loss == pytest.approx(expected.loss, abs=1e-6)
    assert_same_gradients(gradients, whole_gradients(oracle))
    oracle.config = oracle.config.model_copy(update={"max_grad_norm": 0.1})
    expected = oracle.train_batch(collate(rows), loss)
    assert expected["grad_norm"] > 0.11
    for name in ("loss", "grad_norm", "num_rows", "num_tokens", "num_trained_tokens"):
        assert result[name] == pytest.approx(expected[name], rel=2e-6), name
    assert_same_weights(weights, whole_weights(oracle), 1e-6)


# --- the same numbers as one process --------------------------------------------------------------


def sharded_training_equals_one_process(here):
    check_against_local(here)


def tied_weights_are_trained_as_one(here):
    check_against_local(here, "tied")


def a_deferred_reduction_changes_nothing(here):
    check_against_local(here, parallel={"reduce_per_microbatch": False})


def weights_gathered_once_a_batch_are_those_of_the_last_step(here):
    parallel = {"gather_per_microbatch": False, "reduce_per_microbatch": False}
    check_against_local(here, parallel=parallel)
    rows = make_rows(LENGTHS)
    engine = here.engine(parallel=parallel, **CUT)
    losses = [engine.train_batch(share(engine, rows), nll)["loss"] for _ in range(3)]
    losses.append(engine.eval_batch(share(engine, rows), nll))
    if here.is_first:
        oracle = here.local(**CUT)
        expected = [oracle.train_batch(collate(rows), nll)["loss"] for _ in range(3)]
        expected.append(oracle.eval_batch(collate(rows), nll))
        assert losses == pytest.approx(expected, abs=1e-6)


def recomputed_activations_change_nothing(here):
    check_against_local(here, gradient_checkpointing=True)


def tensor_parallel_training_equals_one_process(here):
    check_against_local(here, parallel={"tensor": 2})


def tensor_parallel_layers_recompute_and_defer(here):
    parallel = {"tensor": 2, "reduce_per_microbatch": False}
    check_against_local(here, "tied", parallel=parallel, gradient_checkpointing=True)


def copies_of_shards_equal_one_process(here):
    check_against_local(here, parallel={"replicate": 2})


def copies_of_divided_layers_equal_one_process(here):
    check_against_local(here, parallel={"replicate": 2, "tensor": 2})


def copies_with_a_deferred_reduction_equal_one_process(here):
    check_against_local(here, parallel={"replicate": 2, "reduce_per_microbatch": False})


def an_adapters_dropout_is_of_training_only(here):
    engine = here.engine(lora=LoraConfig(rank=4, dropout=0.5))
    batch = share(engine, make_rows(LENGTHS))
    first, second = (engine.forward(batch)["train_logprobs"] for _ in range(2))
    assert torch.equal(first, second)
    losses = {engine.forward_backward_batch(batch, nll).loss for _ in range(3)}
    assert len(losses) == 1  # adapters start as the base: nothing to drop
    engine.train_batch(batch, nll)
    assert len({engine.forward_backward_batch(batch, nll).loss for _ in range(3)}) > 1


def adapters_are_trained_as_by_one_process(here):
    check_against_local(here, lora=LoraConfig(rank=4))


def adapters_on_divided_layers_are_trained_as_by_one_process(here):
    check_against_local(here, lora=LoraConfig(rank=4), parallel={"tensor": 2})


def blocks_that_do_not_divide_are_computed_whole(here):
    engine = here.engine("odd", parallel={"tensor": 2})
    layer = engine.model.model.layers[0]
    meshes = [layer.self_attn.q_proj.weight.device_mesh, layer.mlp.up_proj.weight.device_mesh]
    assert [mesh.ndim for mesh in meshes] == [1, 2]
    check_against_local(here, "odd", parallel={"tensor": 2})


def squared(outputs, microbatch):
    """Pulls values or scores towards 1."""
    weights = microbatch["loss_weights"]
    if "values" in outputs:
        return (weights * (outputs["values"] - 1.0) ** 2).sum(), {}
    return (weights.sum(1) * (outputs["scores"] - 1.0) ** 2).sum(), {}


def loss_of_values(outputs, microbatch):
    return squared(outputs, microbatch)


def loss_of_scores(outputs, microbatch):
    return squared(outputs, microbatch)


loss_of_values.required_outputs = frozenset({"values"})
loss_of_scores.required_outputs = frozenset({"scores"})
HEADS = {"value_model": loss_of_values, "reward_model": loss_of_scores}


def check_heads(here, *layouts):
    for model_type, loss in HEADS.items():
        for parallel in layouts:
            for lora in (None, LoraConfig(rank=4)):
                options = {"model_type": model_type, "lora": lora, "parallel": parallel}
                check_against_local(here, loss=loss, **options)
                here.close()


def values_and_scores_are_trained_as_by_one_process(here):
    check_heads(here, {}, {"tensor": 2})


def values_and_scores_on_copies_are_trained_as_by_one_process(here):
    check_heads(here, {"replicate": 2}, {"tensor": 2})


def scalar_heads_compute_in_fp32_and_go_through_files(here):
    for model_type, loss in HEADS.items():
        options = {"model_type": model_type, "dtype": "bfloat16", "lr": 1e-2}
        engine = here.engine(**options)
        seen = []
        head = scalar_head(engine.model)
        head.register_forward_pre_hook(lambda m, args, seen=seen: seen.append(m.weight.dtype))
        rows = make_rows(LENGTHS)
        for _ in range(2):
            engine.train_batch(share(engine, rows), loss)
        assert set(seen) == {torch.float32}
        with engine.train_mode():
            engine.to("host")
            assert [bytes_of(engine, part) for part in PARTS] == [0, 0, 0]
        found = engine.forward(share(engine, rows))
        run, target = str(here.folder / f"run-{model_type}"), str(here.folder / model_type)
        engine.save(SaveLoadMeta(target))
        engine.save_checkpoint(run, global_step=1)
        next_loss = engine.train_batch(share(engine, rows), loss)["loss"]
        for parallel in ({}, {"tensor": 2}):
            other = here.engine(parallel=parallel, **options)
            other.load(SaveLoadMeta(target))
            scored = other.forward(share(other, rows))
            for name in found.keys() if not parallel else ():
                assert torch.equal(scored[name], found[name])
            other.load_checkpoint(run)
            resumed = other.train_batch(share(other, rows), loss)["loss"]
            assert resumed == pytest.approx(next_loss, abs=0.05 if parallel else 0)
        if here.is_first:
            local = here.local(**options)
            local.load_checkpoint(run)
            resumed = local.train_batch(collate(rows), loss)["loss"]
            assert resumed == pytest.approx(next_loss, abs=0.05)
        here.close()


def bf16_computes_in_bf16_over_fp32_masters(here):
    engine = here.engine(dtype="bfloat16", **CUT)
    seen = []
    layer = engine.model.model.layers[0].mlp.up_proj
    layer.register_forward_pre_hook(lambda module, args: seen.append(module.weight.dtype))
    rows = make_rows(LENGTHS)
    result = engine.train_batch(share(engine, rows), nll)
    assert set(seen) == {torch.bfloat16}
    states = [v for state in engine.optimizer.state.values() for v in state.values()]
    kept = [*engine.parameters().values(), *states, *(p.grad for p in engine.parameters().values())]
    assert {tensor.dtype for tensor in kept} == {torch.float32}
    gradients = whole_gradients(engine)
    if here.is_first:
        oracle = here.local(dtype="bfloat16", **CUT)
        expected = oracle.train_batch(collate(rows), nll)
        assert result["loss"] == pytest.approx(expected["loss"], abs=0.03)
        assert_same_gradients(gradients, whole_gradients(oracle), rel=0.02)


def bf16_gradients_are_reduced_in_fp32(here):
    """Contributions far below the resolution of bf16 are not lost in the sum over ranks."""
    engine = here.engine(dtype="bfloat16")
    big, small = 1.0, 2.0**-12
    scale = big if here.is_first else small
    rows = make_rows([9, 9])
    batch = collate([rows[0]])
    batch["loss_weights"] = batch["loss_weights"] * scale
    engine.forward_backward_batch(batch, nll)
    both = whole_gradients(engine)
    engine.optimizer_zero_grad()
    batch["loss_weights"] = batch["loss_weights"] * (0.0 if here.is_first else 1.0)
    engine.forward_backward_batch(batch, nll)
    alone = whole_gradients(engine)
    for name, grad in alone.items():
        expected = grad / small * (big + small)
        torch.testing.assert_close(both[name], expected, rtol=1e-5, atol=1e-9, msg=name)


def adapters_over_a_bf16_base_stay_fp32(here):
    engine = here.engine(lora=LoraConfig(rank=4), dtype="bfloat16", **CUT)
    assert {p.dtype for p in engine.parameters().values()} == {torch.float32}
    assert engine.model.model.layers[0].mlp.up_proj.base_layer.weight.dtype == torch.bfloat16
    rows = make_rows(LENGTHS)
    result = engine.train_batch(share(engine, rows), nll)
    if here.is_first:
        oracle = here.local(lora=LoraConfig(rank=4), dtype="bfloat16", **CUT)
        expected = oracle.train_batch(collate(rows), nll)
        assert result["loss"] == pytest.approx(expected["loss"], abs=0.03)


# --- ranks that differ ----------------------------------------------------------------------------


def a_rank_without_weight_takes_part_and_its_loss_is_not_called(here):
    engine = here.engine(**CUT)
    rows = make_rows(LENGTHS)
    last = engine.get_data_parallel_size() - 1
    for row in rows[last :: last + 1]:
        row["loss_weights"] = row["loss_weights"] * 0.0
    calls = []

    def loss(outputs, microbatch):
        calls.append(microbatch.batch_size[0])
        return nll(outputs, microbatch)

    result = engine.forward_backward_batch(share(engine, rows), loss)
    assert bool(calls) is (engine.get_data_parallel_rank() != last)
    gradients = whole_gradients(engine)
    if here.is_first:
        oracle = here.local(**CUT)
        expected = oracle.forward_backward_batch(collate(rows), nll)
        assert result.loss == pytest.approx(expected.loss, abs=1e-6)
        assert_same_gradients(gradients, whole_gradients(oracle))


def nothing_to_train_anywhere_is_no_step(here):
    engine = here.engine()
    rows = make_rows(LENGTHS)
    for row in rows:
        row["loss_weights"] = row["loss_weights"] * 0.0
    before = whole_weights(engine)
    result = engine.train_batch(share(engine, rows), nll)
    assert (result["loss"], result["update_successful"]) == (0.0, 0.0)
    assert_same_weights(whole_weights(engine), before, 0.0)


def means_are_combined_over_ranks(here):
    """The other convention: a mean per micro-batch, weighted by ``loss_weight_fn``."""
    engine = here.engine(**CUT)
    rows = make_rows(LENGTHS)

    def mean_nll(outputs, microbatch):
        mask = microbatch["loss_mask"]
        loss = -(outputs["train_logprobs"] * mask).sum() / mask.sum()
        return loss, {"tokens": Metric(float(mask.sum()), 1.0, "sum")}

    def weight(microbatch):
        return float(microbatch["loss_mask"].sum())

    result = engine.forward_backward_batch(share(engine, rows), mean_nll, weight)
    gradients = whole_gradients(engine)
    if here.is_first:
        oracle = here.local()
        expected = oracle.forward_backward_batch(collate(rows), nll)
        assert result.loss == pytest.approx(expected.loss, abs=1e-6)
        assert_same_gradients(gradients, whole_gradients(oracle))
        assert result.metrics["tokens"] == sum(float(row["loss_mask"].sum()) for row in rows)


def a_non_finite_gradient_on_one_rank_skips_the_step_on_all(here):
    engine = here.engine(max_skipped_in_row=2)
    before = whole_weights(engine)
    batch = share(engine, make_rows(LENGTHS))
    last = engine.get_data_parallel_size() - 1

    def broken(outputs, microbatch):
        loss, metrics = nll(outputs, microbatch)
        return (loss * math.nan if engine.get_data_parallel_rank() == last else loss), metrics

    result = engine.train_batch(batch, broken)
    assert result["update_successful"] == 0.0
    assert engine.skipped_steps == 1
    assert_same_weights(whole_weights(engine), before, 0.0)
    assert engine.train_batch(batch, nll)["update_successful"] == 1.0
    engine.train_batch(batch, broken)
    with pytest.raises(TrainingDiverged):
        engine.train_batch(batch, broken)


def a_bad_batch_on_one_rank_raises_on_all_and_harms_nothing(here):
    engine = here.engine(max_tokens_per_microbatch=16)
    rows = make_rows(LENGTHS)
    last = engine.get_data_parallel_size() - 1
    bad = share(engine, rows)
    if engine.get_data_parallel_rank() == last:
        bad = collate(make_rows([20]))
    with pytest.raises(DataError, match=r"row 0.*20 tokens > 16"):
        engine.train_batch(bad, nll)
    unweighted = share(engine, rows)
    if engine.get_data_parallel_rank() == last:
        del unweighted["loss_weights"]
    with pytest.raises(DataError, match="loss_weights: missing"):
        engine.train_batch(unweighted, nll)
    loss = engine.train_batch(share(engine, rows), nll)["loss"]
    if here.is_first:
        assert loss == pytest.approx(here.local().train_batch(collate(rows), nll)["loss"], abs=1e-6)


def a_loss_that_raises_leaves_no_gradient_behind(here):
    for each in (True, False):
        parallel = {"reduce_per_microbatch": each, "gather_per_microbatch": each}
        engine = here.engine(**CUT, parallel=parallel)
        rows = make_rows([9, 5, 7, 11, 6, 3, 8, 4])
        calls = []

        def failing(outputs, microbatch, calls=calls):
            calls.append(None)
            if len(calls) == 2:
                raise ZeroDivisionError
            return nll(outputs, microbatch)

        with pytest.raises(ZeroDivisionError):
            engine.train_batch(share(engine, rows), failing)
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(share(engine, rows), nll)
        gradients = whole_gradients(engine)
        if here.is_first:
            oracle = here.local(**CUT)
            oracle.forward_backward_batch(collate(rows), nll)
            assert_same_gradients(gradients, whole_gradients(oracle))


def a_loss_may_change_its_outputs_in_place(here):
    engine = here.engine()

    def scaled(outputs, microbatch):
        outputs["train_logprobs"].mul_(2.0)
        return nll(outputs, microbatch)

    rows = make_rows(LENGTHS)
    engine.forward_backward_batch(share(engine, rows), scaled)
    gradients = whole_gradients(engine)
    if here.is_first:
        oracle = here.local()
        oracle.forward_backward_batch(collate(rows), nll)
        expected = {name: 2.0 * grad for name, grad in whole_gradients(oracle).items()}
        assert_same_gradients(gradients, expected)


def scores_come_back_in_each_ranks_own_order(here):
    engine = here.engine(microbatch_size=2)
    rows = make_rows(LENGTHS)
    mine = share(engine, rows)
    found = engine.forward(mine)["train_logprobs"]
    model = reference.load(here.models["plain"])
    with torch.no_grad():
        for b, n in enumerate(mine["attention_mask"].sum(1).tolist()):
            expected = reference.logprobs(model, mine["input_ids"][b, :n])
            torch.testing.assert_close(found[b, :n], expected, rtol=0, atol=1e-5)
    logits = engine.forward(mine, post_hook=lambda logits, microbatch: logits.sum((1, 2)))
    assert logits.shape == mine.batch_size


def data_parallel_ranks_are_counted_once(here):
    for parallel, size in (({}, here.world), ({"tensor": 2}, here.world // 2)):
        engine = here.engine(parallel=parallel)
        assert engine.get_data_parallel_size() == size
        assert engine.get_data_parallel_rank() == here.rank // (here.world // size)
        assert engine._gather_over_ranks(here.rank // (here.world // size)) == list(range(size))
        assert engine._sum_over_ranks(1.0) == size
        assert engine.is_mp_src_rank_with_outputs() is (here.rank % (here.world // size) == 0)
        here.close()


# --- adapters -------------------------------------------------------------------------------------


def the_base_is_the_reference_and_exports_merge_copies(here):
    for parallel in ({}, {"tensor": 2}):
        engine = here.engine(lora=LoraConfig(rank=4), parallel=parallel, lr=2e-2)
        batch = share(engine, make_rows(LENGTHS))
        start = engine.forward(batch)["train_logprobs"]
        for _ in range(3):
            engine.train_batch(batch, nll)
        moved = engine.forward(batch)["train_logprobs"]
        assert (moved - start).abs().max() > 1e-3
        for context in (engine.disable_adapter(), engine.reference()):
            with context:
                torch.testing.assert_close(
                    engine.forward(batch)["train_logprobs"], start, rtol=0, atol=1e-6
                )
        before = [local_part(p).clone() for p in engine.model.parameters()]
        target = here.folder / f"merged{len(parallel)}"
        engine.save(SaveLoadMeta(str(target)))
        assert all(
            torch.equal(local_part(p), kept)
            for p, kept in zip(engine.model.parameters(), before, strict=True)
        )
        model = reference.load(target)
        with torch.no_grad():
            n = int(batch["attention_mask"][0].sum())
            found = reference.logprobs(model, batch["input_ids"][0, :n])
        torch.testing.assert_close(found, moved[0, :n], rtol=0, atol=1e-4)
        here.close()


def an_adapter_file_goes_from_ranks_to_one_process_and_back(here):
    engine = here.engine(lora=LoraConfig(rank=4), lr=2e-2)
    train(engine, range(2))
    batch = share(engine, make_rows(LENGTHS))
    expected = engine.forward(batch)["train_logprobs"]
    path = str(here.folder / "adapter")
    engine.save(SaveLoadMeta(path, weight_format="adapter"))
    stream, peft_config = engine.get_per_tensor_param(adapter_only=True)
    names = [name for name, _ in stream]
    assert names == [spec.name for spec in engine.adapter_specs()]
    assert peft_config["r"] == 4
    if here.is_first:
        local = here.local(lora=LoraConfig(adapter_path=path))
        found = local.forward(batch)["train_logprobs"]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    other = here.engine(lora=LoraConfig(rank=4), parallel={"tensor": 2})
    other.load(SaveLoadMeta(path))
    everyone = collate(make_rows(LENGTHS))
    with pytest.raises(DataError, match="were given different ones"):
        other.forward(batch)
    found = other.forward(everyone)["train_logprobs"]
    again = engine.forward(everyone)["train_logprobs"]
    torch.testing.assert_close(found, again, rtol=0, atol=1e-5)
    started = here.engine(lora=LoraConfig(adapter_path=path), lr=2e-2)
    train(started, range(1))
    with started.reference():
        found = started.forward(batch)["train_logprobs"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


# --- placement ------------------------------------------------------------------------------------

PARTS = ("model", "optimizer", "grad")


def bytes_of(engine, part):
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for tensor in engine._tensors_of(part)
    }
    return sum(storages.values())


def every_part_can_be_away_alone_and_with_others(here):
    for parallel in ({}, {"tensor": 2}):
        kept = here.engine(parallel=parallel)
        batch = share(kept, make_rows(LENGTHS))
        for _ in range(3):
            kept.train_batch(batch, nll)
        expected = whole_weights(kept)
        for number in range(1, 8):
            away = [part for bit, part in enumerate(PARTS) if number >> bit & 1]
            keys = {"model": "params", "optimizer": "optimizer", "grad": "grads"}
            config = {f"offload_{keys[part]}": True for part in away}
            engine = here.engine(parallel=parallel, **config)
            with engine.train_mode():
                engine.train_batch(batch, nll)
                engine.optimizer_zero_grad()
                engine.forward_backward_batch(batch, nll)
            assert [part for part in PARTS if bytes_of(engine, part) == 0] == away
            engine.optimizer_step()
            with pytest.raises(ZeroDivisionError), engine.train_mode():
                raise ZeroDivisionError
            engine.to("host")
            assert [bytes_of(engine, part) for part in PARTS] == [0, 0, 0]
            engine.to("device", model=False, grad=False)
            assert [bytes_of(engine, part) > 0 for part in PARTS] == [False, True, False]
            engine.forward(batch)
            assert bytes_of(engine, "model") == 0
            engine.train_batch(batch, nll)
            assert_same_weights(whole_weights(engine), expected, 0.0)
            assert bytes_of(engine, "model") == 0
            engine.destroy()
        here.close()


# --- files ----------------------------------------------------------------------------------------


def a_saved_directory_is_the_one_that_one_process_writes(here):
    for model, parallel in (("plain", {}), ("tied", {"tensor": 2})):
        engine = here.engine(model, parallel=parallel)
        train(engine, range(1))
        weights = whole_weights(engine)
        names = [spec.name for spec in engine.get_param_specs()]
        assert list(weights) == names
        target = here.folder / f"saved-{model}"
        engine.save(SaveLoadMeta(str(target)))
        found = load_file(target / "model.safetensors")
        assert found.keys() == load_file(f"{here.models[model]}/model.safetensors").keys()
        config = json.loads((target / "config.json").read_text())
        assert config["architectures"] == ["Qwen3ForCausalLM"]
        assert all(torch.equal(found[name], weights[name]) for name in found)
        other = here.engine(model)
        other.load(SaveLoadMeta(str(target)))
        assert_same_weights(whole_weights(other), weights, 0.0)
        with pytest.raises(DataError, match="does not fit"):
            other.load(SaveLoadMeta(here.models["odd"]))
        assert_same_weights(whole_weights(other), weights, 0.0)
        here.close()


def a_directory_that_cannot_be_written_is_an_error_on_every_rank(here):
    engine = here.engine()
    blocked = here.folder / "a-file"
    if here.is_first:
        blocked.write_text("")
    with pytest.raises(CheckpointError):
        engine.save(SaveLoadMeta(str(blocked / "model")))
    with pytest.raises(CheckpointError):
        engine.save_checkpoint(str(blocked), global_step=1)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        engine.load_checkpoint(str(here.folder / "nothing"))
    train(engine, range(1))


def saving_on_one_rank_is_an_error_in_time(here):
    """The last check of its start: the ranks are out of step afterwards."""
    engine = here.engine()
    train(engine, range(1))
    outcome = torch.distributed.FileStore(str(here.folder / "outcome"), 2)
    if here.is_first:
        began = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ranks, "MEETING_TIMEOUT_S", 2.0)
            with pytest.raises(EngineError, match="save_checkpoint: called on rank 0 and not on"):
                engine.save_checkpoint(str(here.folder / "alone"), global_step=1)
        assert time.monotonic() - began < 30
        assert not (here.folder / "alone").exists()
        outcome.set("raised", "yes")
    outcome.wait(["raised"])


def different_calls_of_the_ranks_are_an_error_on_all(here):
    engine = here.engine()
    target = here.folder / "different"
    message = rf"called on rank {here.rank} while ranks \[{1 - here.rank}\] call something else"
    calls = [
        lambda: engine.save(SaveLoadMeta(str(target))),
        lambda: engine.save_checkpoint(str(target), global_step=1),
    ]
    with pytest.raises(EngineError, match=message):
        calls[here.rank]()
    assert not target.exists()
    train(engine, range(1))


def a_resumed_run_is_the_same_bit_for_bit(here):
    for number, parallel in enumerate(({}, {"tensor": 2})):
        lora = LoraConfig(rank=4, dropout=0.3) if number == 0 else None
        config = {"schedule": "cosine", "warmup_steps": 2, "lr": 1e-2, "parallel": parallel}
        torch.manual_seed(here.rank if number == 0 else 0)
        straight = here.engine(lora=lora, **config)
        train(straight, range(2))
        straight.set_version(5)
        run = str(here.folder / f"run{number}")
        straight.save_checkpoint(run, global_step=2)
        losses = train(straight, range(2, 4))
        weights = whole_weights(straight)
        torch.manual_seed(99)
        resumed = here.engine(lora=lora, **config)
        resumed.load_checkpoint(run)
        assert train(resumed, range(2, 4)) == losses
        assert resumed.get_version() == 5
        assert_same_weights(whole_weights(resumed), weights, 0.0)
        here.close()


LAYOUTS = {
    1: [{}],
    2: [{}, {"tensor": 2}],
    4: [{}, {"replicate": 2}, {"tensor": 2}, {"replicate": 2, "tensor": 2}],
}
STEPS_BEFORE, STEPS_AFTER = 4, 16


def resharding_config():
    return {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 2, "model": "tied", **CUT}


def a_checkpoint_of_one_process_goes_on_in_every_layout_and_back(here):
    """The parent has trained ``straight`` on one process for all steps, and saved it half-way."""
    straight = here.models["straight"]
    expected = load_file(f"{straight}/after/model.safetensors")
    losses = torch.load(f"{straight}/losses.pt", weights_only=True)
    for number, parallel in enumerate(LAYOUTS[here.world]):
        engine = here.engine(parallel=parallel, **resharding_config())
        engine.load_checkpoint(f"{straight}/run")
        found = train(engine, range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER))
        assert found == pytest.approx(losses[STEPS_BEFORE:], abs=1e-6)
        weights = whole_weights(engine)
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=0, atol=2e-6, msg=name)
        run = str(here.folder / f"resharded{number}")
        engine.save_checkpoint(run, global_step=20)
        if here.is_first:
            back = here.local(**resharding_config())
            back.load_checkpoint(run)
            assert_same_weights(whole_weights(back), weights, 0.0)
            next_local = train(back, [20])
        next_sharded = train(engine, [20])
        if here.is_first:
            assert next_local == pytest.approx(next_sharded, abs=1e-6)
        here.close()


def fused_experts_are_exported_as_on_disk(here):
    """Experts are one tensor in memory and many on disk, on every rank."""
    source = load_file(f"{here.models['experts']}/model.safetensors")
    engine = here.engine("experts", **SMOOTH)
    weights = whole_weights(engine)
    specs = {spec.name: spec for spec in engine.get_param_specs()}
    assert weights.keys() == specs.keys() == source.keys()
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in weights
    for name, tensor in source.items():
        assert torch.equal(weights[name], tensor), name
        assert specs[name].shape == tuple(tensor.shape)
    losses = train(engine, range(1))
    trained = whole_weights(engine)
    engine.save(SaveLoadMeta(str(here.folder / "experts")))
    assert load_file(here.folder / "experts" / "model.safetensors").keys() == source.keys()
    if here.is_first:
        oracle = here.local("experts", **SMOOTH)
        assert train(oracle, range(1)) == pytest.approx(losses, abs=1e-6)
        for name, tensor in whole_weights(oracle).items():
            torch.testing.assert_close(trained[name], tensor, rtol=0, atol=1e-6, msg=name)
    with pytest.raises(CapabilityError, match="tensor-parallel plan has"):
        here.engine("experts", parallel={"tensor": 2})


# --- weights on their way out ---------------------------------------------------------------------


def only_the_first_rank_publishes(here):
    engine = here.engine("tied", parallel={"tensor": 2})
    meta = WeightUpdateMeta(
        type="inprocess", version=1, incarnation="a", channel=f"rank{here.rank}", dtype="bfloat16"
    )
    future = expect(meta)
    engine.upload_weights(meta)
    assert future.done() is here.is_first
    weights = whole_weights(engine)
    if here.is_first:
        with open_published(future.result()) as tensors:
            assert list(tensors) == [spec.name for spec in engine.get_param_specs()]
            assert all(torch.equal(tensors[n], w.bfloat16()) for n, w in weights.items())


def ranks_listen_on_loopback_only(here):
    engine = here.engine()
    train(engine, range(1))
    listening = [
        connection.laddr.ip
        for connection in psutil.Process().net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert set(listening) <= {"127.0.0.1"}
    assert listening


def a_failed_publish_is_an_error_on_every_rank(here):
    engine = here.engine()
    meta = WeightUpdateMeta(
        type="disk", version=1, incarnation="a", channel="disk", path="/proc/nowhere"
    )
    with pytest.raises((WeightSyncError, EngineError)):
        engine.upload_weights(meta)
    train(engine, range(1))


def engines_of_one_layout_share_its_groups(here):
    """Each has threads, and lives as long as the ranks' own group."""
    train(here.engine(), range(1))
    for layout in ({}, {"tensor": 2}, {"sequence": 2}):
        counts = []
        for _ in range(3):
            engine = here.engine(parallel=layout)
            train(engine, range(1))
            counts.append(psutil.Process().num_threads())
            engine.destroy()
        assert counts[0] == counts[1] == counts[2], layout
