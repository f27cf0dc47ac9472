import json
import logging

import pytest
import torch

from tandem.config.schema import ParallelConfig, TrainConfig
from tandem.errors import CapabilityError, ConfigError
from tandem.train import EngineRegistry, FSDPTrainEngine, LocalTrainEngine
from tandem.types import FinetuneSpec, SaveLoadMeta
from tests.train import checks_fsdp as checks
from tests.train.conftest import make_batch, nll, save_qwen3
from tests.train.ranks import Rank, run_checks

ON_TWO_RANKS = [
    checks.sharded_training_equals_one_process,
    checks.tied_weights_are_trained_as_one,
    checks.a_deferred_reduction_changes_nothing,
    checks.tensor_parallel_training_equals_one_process,
    checks.tensor_parallel_layers_recompute_and_defer,
    checks.adapters_on_divided_layers_are_trained_as_by_one_process,
    checks.blocks_that_do_not_divide_are_computed_whole,
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


def outcomes(world, listed):
    @pytest.fixture(scope="module")
    def run(tmp_path_factory, models):
        return run_checks(world, listed, tmp_path_factory.mktemp(f"world{world}"), models)

    return run


two_ranks = outcomes(2, ON_TWO_RANKS)
four_ranks = outcomes(4, ON_FOUR_RANKS)
four_ranks_long = outcomes(4, ON_FOUR_RANKS_LONG)


@pytest.mark.parametrize("name", [check.__name__ for check in ON_TWO_RANKS])
def test_on_two_ranks(two_ranks, name):
    assert two_ranks[name] is None, two_ranks[name]


@pytest.mark.parametrize("name", [check.__name__ for check in ON_FOUR_RANKS])
def test_on_four_ranks(four_ranks, name):
    assert four_ranks[name] is None, four_ranks[name]


@pytest.mark.long
@pytest.mark.parametrize("name", [check.__name__ for check in ON_FOUR_RANKS_LONG])
def test_the_rest_on_four_ranks(four_ranks_long, name):
    assert four_ranks_long[name] is None, four_ranks_long[name]
