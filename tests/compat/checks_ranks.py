"""What ranks of a sharded engine must do under both views; ``test_ranks`` runs them on two."""

import torch

from tandem.compat.areal import TrainEngine
from tandem.compat.verl import BaseEngine
from tests.compat.conftest import make_sequences
from tests.compat.test_areal import cross_entropy
from tests.compat.test_areal import make_batch as areal_batch
from tests.compat.test_verl import CUTS, expected_gradients, mean_nll
from tests.compat.test_verl import make_batch as verl_batch
from tests.train.checks_fsdp import assert_same_gradients, whole_gradients

SHARES = ([0, 1, 2], [3])
"""Rows of each rank: unequal numbers of rows, tokens and micro-batches."""


def share(here, rows):
    return [rows[row] for row in SHARES[here.rank]]


def losses_of_verl_are_averaged_as_by_one_process(here):
    sequences, masks = make_sequences()
    loss, expected = expected_gradients(here.models["plain"], sequences, masks)
    view = BaseEngine(here.engine())
    for name in ("one", "one row each", "ten tokens each"):
        batch = verl_batch(share(here, sequences), share(here, masks), **CUTS[name])
        view.optimizer_zero_grad()
        found = view.forward_backward_batch(batch, mean_nll)
        assert_same_gradients(whole_gradients(view.engine), expected)
        total = torch.tensor(sum(found["loss"]))
        torch.distributed.all_reduce(total, op=torch.distributed.ReduceOp.SUM)
        assert abs(float(total) / 2 - loss) < 1e-5
        assert all(type(count) is int for count in found["metrics"]["rows"])


def means_of_areal_are_combined_over_ranks(here):
    sequences, masks = make_sequences()
    loss, expected = expected_gradients(here.models["plain"], sequences, masks)
    view = TrainEngine(here.engine(microbatch_size=1))
    batch = areal_batch(sequences, masks)[torch.tensor(SHARES[here.rank])]
    found = view.train_batch(batch, cross_entropy, lambda rows: rows["loss_mask"].sum())
    assert abs(found["loss"] - loss) < 1e-5
    assert_same_gradients(whole_gradients(view.engine), expected)
