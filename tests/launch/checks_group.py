"""What a group of ranks behind one engine must do; ``test_group`` runs these on two ranks.

The first rank compares its group to a local engine of its own on the whole batch.
"""

import os
import signal

import pytest
import torch

from tandem.algorithms.distillation import Likeliest
from tandem.algorithms.objective import PolicyObjective, Recorder
from tandem.algorithms.preference_objective import PairObjective, RewardObjective
from tandem.algorithms.sft import sft_loss
from tandem.config import LoraConfig, ParallelConfig, TrainConfig
from tandem.data.batch import collate
from tandem.errors import CapabilityError, DataError, EngineError, Preempted
from tandem.launch import current_leader, follow, leading, open_engine
from tandem.trainers.run import StopSignal
from tandem.types import FinetuneSpec
from tests.train.conftest import make_rows, nll
from tests.train.ranks import COLLECTIVE_TIMEOUT_S

LENGTHS = [9, 5, 7, 11, 6, 3, 8]
OPTIONS = {"device": "cpu", "max_grad_norm": None, "lr": 1e-3, "eps": 1e-2, "microbatch_size": 2}
CONFIG = TrainConfig(
    backend="fsdp", parallel=ParallelConfig(timeout_s=COLLECTIVE_TIMEOUT_S), **OPTIONS
)
BRIEF = CONFIG.model_copy(update={"parallel": ParallelConfig(timeout_s=20.0)})
SIMPO = PairObjective("simpo", beta=2.0)


OPENED = []


def led(here, body, *, config=CONFIG, before_following=lambda: None):
    """Run ``body`` on the first rank with the other one behind it; both get what it returns."""

    def run():
        try:
            return body() or {}
        finally:
            while OPENED:
                OPENED.pop().destroy()

    if here.is_first:
        return leading(config, run)
    with StopSignal() as stop:
        before_following()
        return follow(config, stop)


def group_of(here, *, model_type="language_model", lora=None):
    engine = open_engine(
        model_type,
        CONFIG,
        model_path=here.models["plain"],
        lora=lora,
        ft_spec=FinetuneSpec(1, 100, 1),
    )
    OPENED.append(engine)
    return engine


def local_of(here, **options):
    return here.local(**OPTIONS | options)


def trained(engine, batches, loss):
    found = []
    for batch in batches:
        found.append(engine.train_batch(batch, loss))
        engine.lr_scheduler_step()
    return found


def assert_same_steps(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs.keys() - {"num_microbatches"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name


def rl_batch(lengths=LENGTHS):
    rows = make_rows(lengths)
    generator = torch.Generator().manual_seed(5)
    for number, row in enumerate(rows):
        size = len(row["input_ids"])
        row["advantages"] = torch.randn(size, generator=generator)
        row["logprobs"] = torch.zeros(size)
        row["temperature"] = 0.5 + 0.25 * number
    return collate(rows)


def pair_batch(lengths):
    """Pairs of rows, each chosen one first; the mask of a row of negative length is empty."""
    rows = make_rows([abs(length) for length in lengths])
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        row |= {"pair_ids": number // 2, "is_chosen": number % 2 == 0, "loss_weights": 0.25}
        if length < 0:
            row["loss_mask"] = torch.zeros_like(row["loss_mask"])
    return collate(rows)


# --- the same numbers -----------------------------------------------------------------------------


def whole_batches_are_trained_as_by_one_process(here):
    batches = [collate(make_rows(LENGTHS, seed)) for seed in range(3)]

    def body():
        group = group_of(here)
        before = batches[0].clone()
        found = trained(group, batches, sft_loss)
        assert (batches[0] == before).all()
        assert group.get_data_parallel_size() == 2
        assert_same_steps(found, trained(local_of(here), batches, sft_loss))

    led(here, body)


def one_row_is_trained_while_the_other_rank_has_none(here):
    batches = [collate(make_rows([6], seed)) for seed in range(2)]

    def body():
        group = group_of(here)
        found = trained(group, batches, sft_loss)
        assert [step["num_rows"] for step in found] == [1, 1]
        assert_same_steps(found, trained(local_of(here), batches, sft_loss))
        assert group.forward(batches[0])["train_logprobs"].shape == (1, 6)

    led(here, body)


def scores_come_back_in_the_order_of_the_batch(here):
    batch = rl_batch()

    def body():
        group, local = group_of(here), local_of(here)
        for options in ({}, {"outputs": ("train_logprobs",), "trained_only": True}):
            found, expected = group.forward(batch, **options), local.forward(batch, **options)
            assert set(found.keys()) == set(expected.keys())
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
        likeliest = [
            engine.forward(batch, post_hook=Likeliest(3), aggregate_fn=list)
            for engine in (group, local)
        ]
        for (ids, logprobs), (expected_ids, expected) in zip(*likeliest, strict=True):
            assert torch.equal(ids, expected_ids)
            torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-6)

    led(here, body)


def what_a_loss_sees_is_recorded_in_the_order_of_the_batch(here):
    objective = PolicyObjective(single_step=True, entropy_coef=0.01)

    def body():
        recorded = []
        for engine in (group_of(here), local_of(here)):
            batch = rl_batch()
            batch["entropy_loss_weights"] = batch["loss_weights"]
            engine.train_batch(batch, Recorder(objective, batch))
            recorded.append(batch["prox_logprobs"])
        assert recorded[1].abs().sum() > 1
        torch.testing.assert_close(recorded[0], recorded[1], rtol=1e-5, atol=1e-6)

    led(here, body)


def pairs_stay_together(here):
    batch = pair_batch([9, 3, 5, 7, 11, 4])

    def body():
        group = group_of(here, model_type="reward_model")
        local = local_of(here, model_type="reward_model")
        loss = RewardObjective(center_coef=0.1)
        assert_same_steps(trained(group, [batch], loss), trained(local, [batch], loss))
        found, expected = group.infer_batch(batch, loss), local.infer_batch(batch, loss)
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        assert found.metrics == pytest.approx(expected.metrics, rel=1e-4)
        scores = expected.outputs["scores"]
        torch.testing.assert_close(found.outputs["scores"], scores, rtol=1e-4, atol=1e-5)

    led(here, body)


def the_reference_is_without_the_adapter_on_every_rank(here):
    batch = collate(make_rows(LENGTHS))

    def body():
        group = group_of(here, lora=LoraConfig(rank=2))
        before = group.forward(batch, outputs=("train_logprobs",))["train_logprobs"]
        with group.train_mode():
            trained(group, [batch] * 3, sft_loss)
        after = group.forward(batch, outputs=("train_logprobs",))["train_logprobs"]
        with group.reference():
            reference = group.forward(batch, outputs=("train_logprobs",))["train_logprobs"]
        assert not torch.allclose(after, before, atol=1e-4)
        torch.testing.assert_close(reference, before, rtol=1e-5, atol=1e-6)

    led(here, body)


def a_checkpoint_goes_from_one_process_to_the_group_and_back(here):
    batches = [collate(make_rows(LENGTHS, seed)) for seed in range(3)]
    folder = here.folder / "reshard"

    def body():
        expected = trained(local_of(here), batches, sft_loss)
        first, group, last = local_of(here), group_of(here), local_of(here)
        found = trained(first, batches[:1], sft_loss)
        first.save_checkpoint(str(folder / "one"), global_step=1)
        group.load_checkpoint(str(folder / "one"))
        found += trained(group, batches[1:2], sft_loss)
        group.set_version(7)
        group.save_checkpoint(str(folder / "two"), global_step=2)
        last.load_checkpoint(str(folder / "two"))
        assert last.get_version() == 7
        assert_same_steps(found + trained(last, batches[2:], sft_loss), expected)

    led(here, body)


# --- how it ends ----------------------------------------------------------------------------------


def all_ranks_return_the_summary(here):
    assert led(here, lambda: {"steps": 3, "model_dir": None}) == {"steps": 3, "model_dir": None}
    assert current_leader() is None


def an_error_of_the_trainer_ends_all_ranks_with_its_kind(here):
    def body():
        group_of(here)
        raise Preempted("stopped by SIGTERM")

    with pytest.raises(Preempted, match="stopped by SIGTERM"):
        led(here, body)


def check_failing_loss(here, lengths):
    def body():
        group = group_of(here)
        with pytest.raises(CapabilityError, match="no name to tell other ranks"):
            group.train_batch(pair_batch(lengths), nll)
        group.train_batch(pair_batch(lengths), SIMPO)

    # The other rank is in the middle of its own passes then, until its collective gives up.
    with pytest.raises(DataError, match="no response token"):
        led(here, body, config=BRIEF)


def a_loss_that_fails_on_the_first_rank_ends_both_with_its_kind(here):
    check_failing_loss(here, [9, -8, 3, 4])  # the longer pair is the first rank's


def a_loss_that_fails_on_another_rank_ends_both_with_its_kind(here):
    check_failing_loss(here, [9, 8, 3, -4])


def an_engine_whose_ranks_are_out_of_step_refuses_and_is_released(here):
    def body():
        group = group_of(here)
        with group.train_mode():
            with pytest.raises(DataError):
                group.train_batch(pair_batch([9, -8, 3, 4]), SIMPO)
            with pytest.raises(EngineError, match="out of step"):
                group.lr_scheduler_step()
        group.destroy()
        raise DataError("the end")

    with pytest.raises(DataError):
        led(here, body, config=BRIEF)


def a_signal_to_another_rank_reaches_the_first(here):
    def body():
        with StopSignal() as stop:
            current_leader().stop = stop
            group_of(here)
            assert stop.requested == "a signal to another rank"

    led(here, body, before_following=lambda: os.kill(os.getpid(), signal.SIGTERM))
