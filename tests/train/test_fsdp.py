import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tandem.config.schema import ParallelConfig, TrainConfig
from tandem.errors import CapabilityError, ConfigError, EngineError
from tandem.train import EngineRegistry, FSDPTrainEngine, LocalTrainEngine
from tandem.train.tensor_parallel import divide_layers
from tandem.types import FinetuneSpec, SaveLoadMeta
from tests.train import checks_fsdp as checks
from tests.train import reference
from tests.train.conftest import (
    engine_gradients,
    make_batch,
    nll,
    save_experts,
    save_qwen3,
)
from tests.train.ranks import Rank, run_checks

ON_TWO_RANKS = [
    checks.sharded_training_equals_one_process,
    checks.tied_weights_are_trained_as_one,
    checks.a_deferred_reduction_changes_nothing,
    checks.weights_gathered_once_a_batch_are_those_of_the_last_step,
    checks.tensor_parallel_training_equals_one_process,
    checks.tensor_parallel_layers_recompute_and_defer,
    checks.adapters_on_divided_layers_are_trained_as_by_one_process,
    checks.an_adapters_dropout_is_of_training_only,
    checks.blocks_that_do_not_divide_are_computed_whole,
    checks.values_and_scores_are_trained_as_by_one_process,
    checks.scalar_heads_compute_in_fp32_and_go_through_files,
    checks.bf16_computes_in_bf16_over_fp32_masters,
    checks.bf16_gradients_are_reduced_in_fp32,
    checks.adapters_over_a_bf16_base_stay_fp32,
    checks.a_rank_without_weight_takes_part_and_its_loss_is_not_called,
    checks.nothing_to_train_anywhere_is_no_step,
    checks.means_are_combined_over_ranks,
    checks.a_non_finite_gradient_on_one_rank_skips_the_step_on_all,
    checks.a_bad_batch_on_one_rank_raises_on_all_and_harms_nothing,
    checks.a_loss_that_raises_leaves_no_gradient_behind,
    checks.a_loss_may_change_its_outputs_in_place,
    checks.scores_come_back_in_each_ranks_own_order,
    checks.the_base_is_the_reference_and_exports_merge_copies,
    checks.an_adapter_file_goes_from_ranks_to_one_process_and_back,
    checks.every_part_can_be_away_alone_and_with_others,
    checks.a_saved_directory_is_the_one_that_one_process_writes,
    checks.a_directory_that_cannot_be_written_is_an_error_on_every_rank,
    checks.a_resumed_run_is_the_same_bit_for_bit,
    checks.a_checkpoint_of_one_process_goes_on_in_every_layout_and_back,
    checks.only_the_first_rank_publishes,
    checks.a_failed_publish_is_an_error_on_every_rank,
    checks.fused_experts_are_exported_as_on_disk,
    checks.ranks_listen_on_loopback_only,
    checks.engines_of_one_layout_share_its_groups,
]
ON_FOUR_RANKS = [
    checks.sharded_training_equals_one_process,
    checks.copies_of_shards_equal_one_process,
    checks.tensor_parallel_training_equals_one_process,
    checks.copies_of_divided_layers_equal_one_process,
    checks.data_parallel_ranks_are_counted_once,
    checks.a_checkpoint_of_one_process_goes_on_in_every_layout_and_back,
]
ON_FOUR_RANKS_LONG = [
    checks.tied_weights_are_trained_as_one,
    checks.values_and_scores_on_copies_are_trained_as_by_one_process,
    checks.recomputed_activations_change_nothing,
    checks.copies_with_a_deferred_reduction_equal_one_process,
    checks.tensor_parallel_layers_recompute_and_defer,
    checks.adapters_are_trained_as_by_one_process,
    checks.adapters_on_divided_layers_are_trained_as_by_one_process,
    checks.adapters_over_a_bf16_base_stay_fp32,
    checks.a_rank_without_weight_takes_part_and_its_loss_is_not_called,
    checks.a_non_finite_gradient_on_one_rank_skips_the_step_on_all,
    checks.the_base_is_the_reference_and_exports_merge_copies,
    checks.every_part_can_be_away_alone_and_with_others,
    checks.a_resumed_run_is_the_same_bit_for_bit,
    checks.only_the_first_rank_publishes,
]


@pytest.fixture(scope="module")
def models(tmp_path_factory, model_path, tied_path):
    folder = tmp_path_factory.mktemp("sharded")
    odd = save_qwen3(folder / "odd", num_attention_heads=3, num_key_value_heads=3)
    found = {"plain": model_path, "tied": tied_path, "odd": odd, "straight": str(folder)}
    found["experts"] = save_experts(folder / "experts")
    here = Rank(0, 1, folder, found)
    engine = here.local(**checks.resharding_config())
    losses = checks.train(engine, range(checks.STEPS_BEFORE))
    engine.save_checkpoint(str(folder / "run"), global_step=checks.STEPS_BEFORE)
    steps = range(checks.STEPS_BEFORE, checks.STEPS_BEFORE + checks.STEPS_AFTER)
    losses += checks.train(engine, steps)
    torch.save(losses, folder / "losses.pt")
    engine.save(SaveLoadMeta(str(folder / "after")))
    here.close()
    return found


def assert_all_hold(world, listed, folder, models):
    """One test for all checks of a start: workers of pytest-xdist would start them anew."""
    outcomes = run_checks(world, listed, folder, models)
    failed = {name: error for name, error in outcomes.items() if error is not None}
    assert not failed, "\n".join(f"{name}\n{error}" for name, error in failed.items())


def test_every_check_holds_on_two_ranks(tmp_path, models):
    assert_all_hold(2, ON_TWO_RANKS, tmp_path, models)


def test_the_layouts_hold_on_four_ranks(tmp_path, models):
    assert_all_hold(4, ON_FOUR_RANKS, tmp_path, models)


@pytest.mark.long
def test_the_other_checks_hold_on_four_ranks(tmp_path, models):
    assert_all_hold(4, ON_FOUR_RANKS_LONG, tmp_path, models)


def test_a_save_that_some_rank_does_not_call_ends(tmp_path, models):
    listed = [
        checks.different_calls_of_the_ranks_are_an_error_on_all,
        checks.saving_on_one_rank_is_an_error_in_time,
    ]
    assert_all_hold(2, listed, tmp_path, models)


# --- one process, without a launcher --------------------------------------------------------------


@pytest.fixture
def make_sharded(model_path):
    made = []

    def make(**config):
        config = {"device": "cpu", "backend": "fsdp", "max_grad_norm": None} | config
        engine = EngineRegistry.new(
            "language_model", "fsdp", config=TrainConfig(**config), model_path=model_path
        )
        made.append(engine)
        engine.initialize(ft_spec=FinetuneSpec(1, 100, 1))
        return engine

    yield make
    for engine in made:
        engine.destroy()


def test_a_process_alone_is_one_rank_with_the_numbers_of_the_local_engine(
    make_sharded, make_engine
):
    engine = make_sharded()
    assert isinstance(engine, FSDPTrainEngine)
    assert (engine.get_data_parallel_rank(), engine.get_data_parallel_size()) == (0, 1)
    assert engine.get_data_parallel_group() is None
    assert engine.parallelism_group is None
    assert engine.is_mp_src_rank_with_outputs()
    batch = make_batch([9, 5, 7])
    found = engine.forward_backward_batch(batch, nll).loss
    local = make_engine()
    assert found == pytest.approx(local.forward_backward_batch(batch, nll).loss, abs=1e-6)
    checks.assert_same_gradients(checks.whole_gradients(engine), engine_gradients(local))


def test_the_last_engine_to_leave_takes_the_group_down(make_sharded):
    first, second = make_sharded(), make_sharded()
    first.destroy()
    first.destroy()
    assert dist.is_initialized()
    second.train_batch(make_batch([5]), nll)
    second.destroy()
    assert not dist.is_initialized()
    third = make_sharded()
    third.train_batch(make_batch([5]), nll)
    third.destroy()
    with pytest.raises(EngineError, match="initialize"):
        third.get_data_parallel_rank()


def test_a_group_of_the_caller_is_left_alone(make_sharded):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        make_sharded().destroy()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_an_engine_that_could_not_be_built_leaves_no_group(make_sharded, tmp_path):
    config = TrainConfig(device="cpu", backend="fsdp")
    engine = FSDPTrainEngine(config, model_path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"config\.json"):
        engine.initialize()
    assert not dist.is_initialized()
    with pytest.raises(ConfigError, match=r"tensor=2 .* does not divide the 1 ranks"):
        make_sharded(parallel=ParallelConfig(tensor=2))
    assert not dist.is_initialized()


@pytest.mark.parametrize("addr", ["nowhere", "127.0.0.1:99999x", "127.0.0.1:29500"])
def test_an_address_needs_a_port_and_a_launcher(model_path, addr):
    engine = FSDPTrainEngine(TrainConfig(device="cpu"), model_path=model_path)
    with pytest.raises(ConfigError, match="addr"):
        engine.initialize(addr=addr)


def test_layouts_that_a_backend_lacks_are_refused_by_name(model_path):
    parallel = ParallelConfig(tensor=2, replicate=2, sequence=2)
    lacking = "lacks hybrid_sharding, sequence_parallel, tensor_parallel"
    with pytest.raises(CapabilityError, match=lacking):
        LocalTrainEngine(TrainConfig(parallel=parallel), model_path=model_path)


@pytest.mark.parametrize(
    ("plan", "message"),
    [({}, "no tensor-parallel plan"), ({"model.layers.*.mlp.up_proj": "packed_colwise"}, "packed")],
)
def test_models_without_a_known_plan_are_refused(model_path, plan, message):
    model = reference.load(model_path)
    model.tp_plan = plan
    with pytest.raises(CapabilityError, match=message):
        divide_layers(model, None)


# --- under a launcher -----------------------------------------------------------------------------


@pytest.mark.long
def test_the_documented_script_runs_under_torchrun(model_path, tmp_path):
    document = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text()
    script = tmp_path / "train_sharded.py"
    script.write_text(re.findall(r"```python\n(.*?)```", document, re.DOTALL)[0])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    finished = subprocess.run(
        [*command, str(script), model_path, str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert re.findall(r"rows (\d+)", finished.stdout) == ["8", "8", "8"]
    reference.load(tmp_path / "out")
