from __future__ import annotations

import pytest
import torch

from tandem.compat.alignment import from_next_token, to_next_token
from tandem.errors import DataError

MASK = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]], dtype=torch.bool)
OURS = torch.tensor([[0.0, 1.0, 2.0, 9.0], [9.0, 0.0, 5.0, 6.0]])
THEIRS = torch.tensor([[1.0, 2.0, 0.0, 0.0], [0.0, 5.0, 6.0, 0.0]])


def test_what_we_say_about_a_token_they_say_one_earlier() -> None:
    assert torch.equal(to_next_token(OURS, MASK), THEIRS)


def test_the_way_back() -> None:
    noisy = THEIRS + 7.0 * (THEIRS == 0)
    expected = torch.tensor([[0.0, 1.0, 2.0, 0.0], [0.0, 0.0, 5.0, 6.0]])
    assert torch.equal(from_next_token(noisy, MASK), expected)


def test_the_state_after_the_last_token_is_given_apart() -> None:
    found = to_next_token(OURS, MASK, torch.tensor([7.0, 8.0]))
    assert torch.equal(found, torch.tensor([[1.0, 2.0, 7.0, 0.0], [0.0, 5.0, 6.0, 8.0]]))


def test_further_dimensions_follow_their_token() -> None:
    logits = torch.stack([OURS, 10 * OURS], dim=-1)
    found = to_next_token(logits, MASK)
    assert torch.equal(found, torch.stack([THEIRS, 10 * THEIRS], dim=-1))


def test_gradients_reach_the_token_they_belong_to() -> None:
    values = OURS.clone().requires_grad_()
    to_next_token(values, MASK)[0, 0].backward()
    expected = torch.zeros_like(OURS)
    expected[0, 1] = 1.0
    assert torch.equal(values.grad, expected)


def test_a_mask_of_another_shape_is_refused() -> None:
    with pytest.raises(DataError, match="alignment"):
        to_next_token(OURS, MASK[:, :3])
