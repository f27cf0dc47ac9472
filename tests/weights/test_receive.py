import pytest
import torch
from torch import nn

from tandem.errors import WeightSyncError
from tandem.types import ParamSpec
from tandem.weights import Manifest, TensorEntry, check_manifest, load_into


def manifest_of(*entries):
    return Manifest(3, "x", tuple(TensorEntry(n, s, d, 0, 0, "") for n, s, d in entries))


EXPECTED = [ParamSpec("a.weight", (2, 3), "float32"), ParamSpec("b.weight", (4,), "float32")]


def test_manifest_that_fits_passes_in_any_order():
    entries = [("b.weight", (4,), "float32"), ("a.weight", (2, 3), "float32")]
    check_manifest(manifest_of(*entries), EXPECTED)


def test_every_difference_is_named_at_once():
    received = manifest_of(
        ("a.weight", (3, 2), "bfloat16"),
        ("b.weightX", (4,), "float32"),
        ("a.weight", (3, 2), "bfloat16"),
    )
    with pytest.raises(WeightSyncError) as caught:
        check_manifest(received, EXPECTED)
    for words in (
        "version 3",
        "missing: b.weight;",
        "unexpected: b.weightX;",
        "shape of a.weight: got [3, 2], allowed: [2, 3]",
        "dtype of a.weight: got bfloat16, allowed: float32",
        "repeated: a.weight",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize("data", ["", "[]", "{}", '{"version": 1}', {"tensors": [{"name": 1}]}])
def test_text_that_is_no_manifest_is_refused(data):
    with pytest.raises(WeightSyncError, match="manifest"):
        Manifest.from_json(data)


def test_misnamed_tensor_is_refused_and_nothing_is_loaded():
    model = {"a.weight": torch.zeros(2), "b.weight": torch.zeros(2)}
    sent = {"a.weight": torch.ones(2), "b.weightX": torch.ones(2)}
    with pytest.raises(WeightSyncError, match=r"missing: b\.weight; unexpected: b\.weightX\."):
        load_into(model, sent)
    assert all(torch.equal(tensor, torch.zeros(2)) for tensor in model.values())


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (torch.ones(3), "shape of a"),
        (torch.ones(1), "shape of a"),
        (torch.ones(2).double(), "dtype of a"),
    ],
)
def test_tensor_that_copy_would_stretch_or_cast_is_refused(sent, words):
    model = {"first": torch.zeros(1), "a": torch.zeros(2)}
    with pytest.raises(WeightSyncError, match=words):
        load_into(model, {"first": torch.ones(1), "a": sent})
    assert model["first"].item() == 0.0


class Tied(nn.Module):
    def __init__(self, tie: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        if tie:
            self.head.weight = self.embed.weight


def test_tied_parameter_may_be_sent_once_and_stays_tied():
    model = Tied(tie=True)
    new = torch.randn(5, 3)
    load_into(model.state_dict(), {"embed.weight": new})
    assert torch.equal(model.head.weight, new)
    assert model.head.weight is model.embed.weight


def test_head_with_memory_of_its_own_must_be_sent():
    model = Tied(tie=False)
    with pytest.raises(WeightSyncError, match=r"missing: head\.weight"):
        load_into(model.state_dict(), {"embed.weight": torch.randn(5, 3)})


def test_parameters_that_require_gradients_are_loaded_in_place():
    model = Tied(tie=False)
    pointers = [param.data_ptr() for param in model.parameters()]
    new = {name: torch.randn_like(param) for name, param in model.named_parameters()}
    load_into(dict(model.named_parameters()), new)
    assert [param.data_ptr() for param in model.parameters()] == pointers
    assert all(param.requires_grad and param.is_leaf for param in model.parameters())
    assert torch.equal(model.head.weight, new["head.weight"])
