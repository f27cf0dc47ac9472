import pytest
import torch
from torch import nn
from transformers import AttentionInterface

import tandem.models.attention as attention
from tandem.errors import CapabilityError, EngineError


def call(**options: object) -> None:
    module = nn.Module()
    module.layer_idx = 0
    x = torch.zeros(1, 1, 2, 4)
    AttentionInterface()[attention.ATTENTION](module, x, x, x, None, **options)


class Unreachable:
    def attend(self, *_: object, **__: object) -> torch.Tensor:
        raise AssertionError("the attention ran in spite of an option that it ignores")


def test_call_without_context_is_refused() -> None:
    with pytest.raises(EngineError, match="without ctx"):
        call()


@pytest.mark.parametrize("name", ["softcap", "s_aux"])
def test_option_that_changes_attention_weights_is_refused(name: str) -> None:
    with pytest.raises(CapabilityError, match=name):
        call(ctx=Unreachable(), **{name: 30.0})
