"""What ranks that share each sequence must do; ``test_sequence_parallel`` runs each on some."""

import math

import pytest
import torch

from tandem.config.schema import LoraConfig
from tandem.data.batch import collate
from tandem.errors import CapabilityError, DataError
from tandem.train.forward import CANDIDATES
from tandem.types import SaveLoadMeta
from tests.train import reference
from tests.train.checks_fsdp import (
    CUT,
    HEADS,
    LENGTHS,
    PARTS,
    assert_same_gradients,
    assert_same_weights,
    bytes_of,
    check_against_local,
    share,
    train,
    whole_gradients,
    whole_weights,
)
from tests.train.conftest import VOCABULARY, make_rows, nll

SEQUENCE = {"sequence": 2}
WHOLE = {"microbatch_size": None}
"""All rows in one pack: the border lies inside a row, and rows lie on both sides of it."""


def check(here, model="plain", *, parallel=None, **options):
    check_against_local(here, model, parallel=SEQUENCE | (parallel or {}), **options)
    here.close()


# --- the same numbers as one process --------------------------------------------------------------


def training_on_slices_equals_one_process(here):
    check(here)
    check(here, **WHOLE)


def tied_weights_recomputation_and_a_deferred_reduction(here):
    parallel = {"reduce_per_microbatch": False}
    check(here, "tied", parallel=parallel, gradient_checkpointing=True)


def adapters(here):
    check(here, lora=LoraConfig(rank=4))


def values_and_scores(here):
    for model_type, loss in HEADS.items():
        check(here, model_type=model_type, loss=loss, **WHOLE)
        check(here, model_type=model_type, loss=loss, lora=LoraConfig(rank=4))


def key_and_value_heads_are_repeated_where_they_do_not_divide(here):
    check(here, "one_kv_head", **WHOLE)
    check(here, "three_kv_heads", **WHOLE)


def windows_reach_over_the_border(here):
    check(here, "window", **WHOLE)


def outputs_are_those_of_one_process(here):
    """Bit for bit, with temperatures, given positions, and a border in every place of a row."""
    engine = here.engine(parallel=SEQUENCE)
    local = here.local() if here.is_first else None
    for lengths in ([1], [2], [3, 1], [9, 5], [5, 9, 1], [30, 1, 1, 33]):
        rows = make_rows(lengths)
        for number, row in enumerate(rows):
            row["temperature"] = 0.5 + 0.25 * number
            row["position_ids"] = torch.arange(len(row["input_ids"])) + 3 * number
        batch = collate(rows)
        found = engine.forward(batch)
        if local is not None:
            expected = local.forward(batch)
            for name in ("train_logprobs", "entropy"):
                assert torch.equal(found[name], expected[name]), (lengths, name)


def every_last_token_is_scored_wherever_it_lies(here):
    for model_type in HEADS:
        engine = here.engine(model_type=model_type, parallel=SEQUENCE)
        local = here.local(model_type=model_type) if here.is_first else None
        for length in range(1, 12):
            batch = collate(make_rows([length, 5]))
            found = engine.forward(batch)
            if local is not None:
                expected = local.forward(batch)
                for name in found.keys():  # noqa: SIM118
                    torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6)
        here.close()


def logits_and_candidates_come_whole(here):
    engine = here.engine(parallel=SEQUENCE)
    batch = collate(make_rows(LENGTHS))
    logits = engine.forward(batch, post_hook=lambda logits, microbatch: logits)
    model = reference.load(here.models["plain"])
    with torch.no_grad():
        for b, n in enumerate(LENGTHS):
            expected = model(batch["input_ids"][b, None, :n], use_cache=False).logits[0]
            torch.testing.assert_close(logits[b, 1:n], expected[:-1], rtol=0, atol=1e-5)
    ids = torch.arange(3).expand(*batch["input_ids"].shape, 3).contiguous()
    batch["candidate_ids"] = ids

    def likely(outputs, microbatch):
        weights = microbatch["loss_weights"]
        return -(outputs[CANDIDATES].sum(-1) * weights).sum(), {}

    likely.required_outputs = frozenset({CANDIDATES})
    found = engine.forward_backward_batch(batch, likely)
    gradients = whole_gradients(engine)
    if here.is_first:
        oracle = here.local()
        expected = oracle.forward_backward_batch(batch, likely)
        assert found.loss == pytest.approx(expected.loss, abs=1e-6)
        assert_same_gradients(gradients, whole_gradients(oracle))


def bf16_is_close(here):
    engine = here.engine(parallel=SEQUENCE, dtype="bfloat16")
    rows = make_rows(LENGTHS)
    result = engine.train_batch(share(engine, rows), nll)
    gradients = whole_gradients(engine)
    adapted = here.engine(parallel=SEQUENCE, dtype="bfloat16", lora=LoraConfig(rank=4))
    loss = adapted.train_batch(share(adapted, rows), nll)["loss"]
    if here.is_first:
        oracle = here.local(dtype="bfloat16")
        expected = oracle.train_batch(collate(rows), nll)
        assert result["loss"] == pytest.approx(expected["loss"], abs=0.03)
        assert loss == pytest.approx(expected["loss"], abs=0.03)
        assert_same_gradients(gradients, whole_gradients(oracle), rel=0.02)


# --- ranks and rows -------------------------------------------------------------------------------


def ranks_of_one_sequence_count_as_one_and_need_the_same_rows(here):
    size = here.world // 2
    engine = here.engine(parallel=SEQUENCE)
    assert engine.get_data_parallel_size() == size
    assert engine.get_data_parallel_rank() == here.rank // 2
    assert engine._sum_over_ranks(1.0) == size
    assert engine.is_mp_src_rank_with_outputs() is (here.rank % 2 == 0)
    with pytest.raises(DataError, match="compute the same rows"):
        engine.forward(collate(make_rows([6], seed=here.rank)))
    train(engine, range(1))


def rows_without_weight_and_a_loss_that_is_not_finite(here):
    engine = here.engine(parallel=SEQUENCE, **CUT)
    rows = make_rows(LENGTHS)
    for row in rows[::2]:
        row["loss_weights"] = row["loss_weights"] * 0.0
    result = engine.forward_backward_batch(share(engine, rows), nll)
    gradients = whole_gradients(engine)
    if here.is_first:
        oracle = here.local(**CUT)
        expected = oracle.forward_backward_batch(collate(rows), nll)
        assert result.loss == pytest.approx(expected.loss, abs=1e-6)
        assert_same_gradients(gradients, whole_gradients(oracle))

    def broken(outputs, microbatch):
        return nll(outputs, microbatch)[0] * math.nan, {}

    before = whole_weights(engine)
    assert engine.train_batch(share(engine, rows), broken)["update_successful"] == 0.0
    assert_same_weights(whole_weights(engine), before, 0.0)


def heads_and_positions_that_cannot_be_divided_are_refused(here):
    with pytest.raises(CapabilityError, match=r"sequence: got 2, .* 3 attention heads of layer 0"):
        here.engine("odd", parallel=SEQUENCE)
    with pytest.raises(CapabilityError, match="rotary embeddings of type dynamic"):
        here.engine("dynamic", parallel=SEQUENCE)
    train(here.engine(parallel=SEQUENCE), range(1))


# --- placement and files --------------------------------------------------------------------------


def offloaded_parts_come_back_unchanged(here):
    kept = here.engine(parallel=SEQUENCE)
    train(kept, range(2))
    away = {f"offload_{part}": True for part in ("params", "optimizer", "grads")}
    engine = here.engine(parallel=SEQUENCE, **away)
    with engine.train_mode():
        train(engine, range(1))
    assert [bytes_of(engine, part) for part in PARTS] == [0, 0, 0]
    train(engine, range(1, 2))
    assert_same_weights(whole_weights(engine), whole_weights(kept), 0.0)


def checkpoints_and_exports_go_between_layouts(here):
    config = {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 1, "parallel": SEQUENCE}
    engine = here.engine(**config)
    train(engine, range(2))
    run, target = str(here.folder / "run"), here.folder / "saved"
    engine.save_checkpoint(run, global_step=2)
    engine.save(SaveLoadMeta(str(target)))
    weights = whole_weights(engine)
    losses = train(engine, range(2, 4))
    resumed = here.engine(**config)
    resumed.load_checkpoint(run)
    assert_same_weights(whole_weights(resumed), weights, 0.0)
    assert train(resumed, range(2, 4)) == losses
    assert_same_weights(whole_weights(resumed), whole_weights(engine), 0.0)
    other = here.engine(**config | {"parallel": {}})
    other.load_checkpoint(run)
    assert train(other, range(2, 4)) == pytest.approx(losses, abs=1e-6)
    if here.is_first:
        local = here.local(**config | {"parallel": {}})
        local.load_checkpoint(run)
        assert train(local, range(2, 4)) == pytest.approx(losses, abs=1e-6)
        ids = torch.arange(9) * 5 % VOCABULARY
        local.load(SaveLoadMeta(str(target)))
        batch = collate([{"input_ids": ids}])
        with torch.no_grad():
            expected = reference.logprobs(reference.load(target), ids)
        found = local.forward(batch)["train_logprobs"][0]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def the_base_is_the_reference_policy(here):
    engine = here.engine(lora=LoraConfig(rank=4), parallel=SEQUENCE, lr=2e-2)
    batch = share(engine, make_rows(LENGTHS))
    start = engine.forward(batch)["train_logprobs"]
    train(engine, range(3))
    moved = engine.forward(batch)["train_logprobs"]
    assert (moved - start).abs().max() > 1e-3
    with engine.reference():
        found = engine.forward(batch)["train_logprobs"]
    torch.testing.assert_close(found, start, rtol=0, atol=1e-6)


# --- with other axes, on four ranks ---------------------------------------------------------------


def slices_and_rows_equal_one_process(here):
    check(here)
    check(here, **WHOLE)
    check(here, lora=LoraConfig(rank=4), **WHOLE)
    for model_type, loss in HEADS.items():
        check(here, model_type=model_type, loss=loss, **WHOLE)


def slices_and_copies_equal_one_process(here):
    check(here, parallel={"replicate": 2}, **WHOLE)


def slices_and_divided_layers_equal_one_process(here):
    check(here, parallel={"tensor": 2}, **WHOLE)
    check(here, "tied", parallel={"tensor": 2}, gradient_checkpointing=True)
    check(here, parallel={"tensor": 2}, lora=LoraConfig(rank=4), **WHOLE)
    for model_type, loss in HEADS.items():
        check(here, model_type=model_type, loss=loss, parallel={"tensor": 2})


def slices_over_blocks_that_are_computed_whole_equal_one_process(here):
    check(here, "six_heads", parallel={"tensor": 2}, **WHOLE)


def four_slices_of_two_key_and_value_heads_equal_one_process(here):
    check(here, parallel={"sequence": 4})
    check(here, parallel={"sequence": 4}, **WHOLE)
