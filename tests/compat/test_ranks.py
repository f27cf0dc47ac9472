from __future__ import annotations

from tests.compat import checks_ranks as checks
from tests.train.ranks import run_checks


def test_the_views_hold_on_two_ranks(tmp_path, model_path):
    listed = [
        checks.losses_of_verl_are_averaged_as_by_one_process,
        checks.means_of_areal_are_combined_over_ranks,
    ]
    outcomes = run_checks(2, listed, tmp_path, {"plain": model_path})
    failed = {name: error for name, error in outcomes.items() if error is not None}
    assert not failed, "\n".join(f"{name}\n{error}" for name, error in failed.items())
