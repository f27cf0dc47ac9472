import pytest

from tests.train import checks_sequence as checks
from tests.train.conftest import save_qwen3
from tests.train.test_fsdp import assert_all_hold

ON_TWO_RANKS = [
    checks.training_on_slices_equals_one_process,
    checks.tied_weights_recomputation_and_a_deferred_reduction,
    checks.adapters,
    checks.values_and_scores,
    checks.key_and_value_heads_are_repeated_where_they_do_not_divide,
    checks.windows_reach_over_the_border,
    checks.outputs_are_those_of_one_process,
    checks.every_last_token_is_scored_wherever_it_lies,
    checks.logits_and_candidates_come_whole,
    checks.bf16_is_close,
    checks.ranks_of_one_sequence_count_as_one_and_need_the_same_rows,
    checks.rows_without_weight_and_a_loss_that_is_not_finite,
    checks.heads_and_positions_that_cannot_be_divided_are_refused,
    checks.offloaded_parts_come_back_unchanged,
    checks.checkpoints_and_exports_go_between_layouts,
    checks.the_base_is_the_reference_policy,
]
ON_FOUR_RANKS = [
    checks.slices_and_rows_equal_one_process,
    checks.slices_and_copies_equal_one_process,
    checks.slices_and_divided_layers_equal_one_process,
    checks.slices_over_blocks_that_are_computed_whole_equal_one_process,
    checks.four_slices_of_two_key_and_value_heads_equal_one_process,
    checks.ranks_of_one_sequence_count_as_one_and_need_the_same_rows,
    checks.checkpoints_and_exports_go_between_layouts,
]

ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
WINDOW = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 3}


@pytest.fixture(scope="module")
def models(tmp_path_factory, model_path, tied_path):
    folder = tmp_path_factory.mktemp("sequences")
    made = {
        "one_kv_head": {"num_key_value_heads": 1},
        "three_kv_heads": {"num_attention_heads": 6, "num_key_value_heads": 3},
        "six_heads": {"num_attention_heads": 6, "num_key_value_heads": 3},
        "odd": {"num_attention_heads": 3, "num_key_value_heads": 3},
        "dynamic": {"rope_parameters": ROPE},
        "window": WINDOW,
    }
    found = {name: save_qwen3(folder / name, **changes) for name, changes in made.items()}
    return found | {"plain": model_path, "tied": tied_path}


def test_ranks_that_share_each_sequence(tmp_path, models):
    assert_all_hold(2, ON_TWO_RANKS, tmp_path, models)


@pytest.mark.long
def test_shared_sequences_with_other_axes(tmp_path, models):
    assert_all_hold(4, ON_FOUR_RANKS, tmp_path, models)
