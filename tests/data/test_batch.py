import pytest
import torch
from tensordict import TensorDict

from tandem.data.batch import check_batch, collate, concat_batches, to_padded
from tandem.errors import DataError


def rows(*lengths):
    return [
        {
            "input_ids": torch.arange(1, n + 1),
            "versions": torch.full((n,), 3),
            "rewards": float(n),
            "note": n,
        }
        for n in lengths
    ]


def jagged(batch):
    lengths = batch["attention_mask"].sum(1).tolist()
    fields = {
        name: torch.nested.as_nested_tensor(
            [row[:n] for row, n in zip(batch[name], lengths, strict=True)], layout=torch.jagged
        )
        for name in ("input_ids", "versions")
    }
    return TensorDict(fields, batch_size=batch.batch_size)


def test_collate_pads_on_the_right_and_makes_the_mask():
    batch = collate(rows(2, 3))
    assert batch["input_ids"].tolist() == [[1, 2, 0], [1, 2, 3]]
    assert batch["attention_mask"].tolist() == [[True, True, False], [True, True, True]]
    assert batch["versions"].tolist() == [[3, 3, -1], [3, 3, 3]]
    assert batch["rewards"].tolist() == [2.0, 3.0]
    assert batch["rewards"].dtype == torch.float32
    assert batch["note"].tolist() == [2, 3]


def test_collate_names_the_row_that_differs():
    with pytest.raises(DataError, match=r"row 1: keys differ .*\['note'\]"):
        collate([rows(2)[0], {k: v for k, v in rows(2)[0].items() if k != "note"}])


def test_collate_refuses_a_per_token_tensor_of_another_length():
    bad = rows(3)[0] | {"logprobs": torch.zeros(2)}
    with pytest.raises(DataError, match=r"row 0, logprobs: expected shape \(3,\)"):
        collate([bad])


def test_concat_pads_again_to_the_widest():
    batch = concat_batches([collate(rows(2)), collate(rows(4, 1))])
    assert batch["input_ids"].tolist() == [[1, 2, 0, 0], [1, 2, 3, 4], [1, 0, 0, 0]]
    assert batch["attention_mask"].sum(1).tolist() == [2, 4, 1]
    assert batch["versions"][0].tolist() == [3, 3, -1, -1]


def test_concat_of_jagged_batches_stays_jagged():
    batch = concat_batches([jagged(collate(rows(2))), jagged(collate(rows(4, 1)))])
    assert [row.tolist() for row in batch["input_ids"].unbind()] == [[1, 2], [1, 2, 3, 4], [1]]


def test_concat_refuses_different_keys():
    with pytest.raises(DataError, match=r"batch 1: keys differ .*\['note'\]"):
        concat_batches([collate(rows(2)), collate(rows(2)).exclude("note")])


def test_jagged_round_trip():
    padded, layout = to_padded(jagged(collate(rows(2, 3))))
    assert padded["input_ids"].tolist() == [[1, 2, 0], [1, 2, 3]]
    assert padded["versions"].tolist() == [[3, 3, -1], [3, 3, 3]]
    back = layout.restore(padded["versions"])
    assert back.is_nested
    assert [row.tolist() for row in back.unbind()] == [[3, 3], [3, 3, 3]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": torch.ones(2, 2, dtype=torch.bool)}, r"loss_mask: expected shape \(2, 3\)"),
        ({"rewards": torch.zeros(2, 1)}, r"rewards: expected shape \(2,\) \(B\)"),
        ({"loss_mask": torch.ones(2, 3)}, r"loss_mask: expected dtype torch.bool"),
        ({"logprob": torch.zeros(2, 3)}, r"'logprob': did you mean 'logprobs'"),
        ({"loss_weight": torch.zeros(2, 3)}, r"did you mean 'loss_weights'"),
        ({"attention_mask": torch.tensor([[1, 0, 1], [1, 1, 1]]).bool()}, "row 0 has a hole"),
    ],
)
def test_bad_keys_are_named(change, message):
    batch = collate(rows(3, 3))
    batch.update(change)
    with pytest.raises(DataError, match=message):
        check_batch(batch)


def test_a_missing_required_key_lists_what_is_there():
    with pytest.raises(DataError, match=r"advantages: missing.*\[BT\].*rewards"):
        check_batch(collate(rows(3)), required=["advantages"])
    with pytest.raises(DataError, match="attention_mask: missing"):
        check_batch(collate(rows(3)).exclude("attention_mask"))


def test_unknown_keys_travel():
    batch = collate(rows(3))
    batch["my_own_table"] = torch.zeros(1, 7, 2)
    check_batch(batch)


def test_loss_weights_may_be_per_row_or_per_token():
    for shape in ((2,), (2, 3)):
        batch = collate(rows(3, 3))
        batch["loss_weights"] = torch.ones(shape)
        check_batch(batch)
