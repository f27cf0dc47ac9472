import json

import pytest

from tandem.algorithms.distillation import Likeliest
from tandem.algorithms.objective import PolicyObjective
from tandem.algorithms.preference_objective import KTOObjective, PairObjective, RewardObjective
from tandem.algorithms.sft import sft_loss
from tandem.algorithms.value import ValueObjective
from tandem.errors import CapabilityError
from tandem.launch.losses import from_json, to_json
from tests.launch import checks_group as checks
from tests.train.ranks import run_checks

CHECKS = [
    checks.whole_batches_are_trained_as_by_one_process,
    checks.one_row_is_trained_while_the_other_rank_has_none,
    checks.scores_come_back_in_the_order_of_the_batch,
    checks.what_a_loss_sees_is_recorded_in_the_order_of_the_batch,
    checks.pairs_stay_together,
    checks.the_reference_is_without_the_adapter_on_every_rank,
    checks.a_checkpoint_goes_from_one_process_to_the_group_and_back,
    checks.all_ranks_return_the_summary,
    checks.an_error_of_the_trainer_ends_all_ranks_with_its_kind,
    checks.a_loss_that_fails_on_the_first_rank_ends_both_with_its_kind,
    checks.a_loss_that_fails_on_another_rank_ends_both_with_its_kind,
    checks.an_engine_whose_ranks_are_out_of_step_refuses_and_is_released,
    checks.a_signal_to_another_rank_reaches_the_first,
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, model_path):
    return run_checks(2, CHECKS, tmp_path_factory.mktemp("group"), {"plain": model_path})


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_two_ranks(outcomes, check):
    assert outcomes[check.__name__] is None, outcomes[check.__name__]


@pytest.mark.parametrize(
    "function",
    [
        None,
        sft_loss,
        PolicyObjective("ppo_clip", {"clip_low": 0.1}, kl_coef=0.1, single_step=True),
        ValueObjective(clip=0.2),
        PairObjective("ipo", beta=0.3, length_normalised=False),
        KTOObjective(undesirable_weight=2.0),
        RewardObjective(center_coef=0.1),
        Likeliest(4),
    ],
    ids=lambda function: getattr(function, "__name__", type(function).__name__),
)
def test_a_loss_is_the_same_behind_its_name(function):
    assert from_json(json.loads(json.dumps(to_json(function)))) == function


def test_a_loss_without_a_name_is_refused():
    def of_a_user(outputs, microbatch):
        raise AssertionError

    with pytest.raises(CapabilityError, match=r"got .*of_a_user, .*known: sft, policy"):
        to_json(of_a_user)
