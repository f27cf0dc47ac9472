import pytest
import torch

from tandem.models.normaliser import SUM_BLOCK, combine_exp_sums, exp_sums

WIDTHS = [1, 60, SUM_BLOCK, SUM_BLOCK + 1, 5 * SUM_BLOCK + 17]


@pytest.mark.parametrize("width", WIDTHS)
def test_log_probabilities_and_entropy_equal_those_of_log_softmax(width):
    logits = 5 * torch.randn(7, width, generator=torch.Generator().manual_seed(0)).double()
    found = combine_exp_sums([exp_sums(logits, with_moments=True)])
    expected = logits.log_softmax(-1)
    torch.testing.assert_close(found.logprobs(logits[:, -1]), expected[:, -1])
    torch.testing.assert_close(found.entropy(), -(expected.exp() * expected).sum(-1))


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_pieces_of_the_vocabulary_add_up_to_the_bits_of_the_whole(rows):
    width = 9 * SUM_BLOCK + 31
    logits = torch.randn(64, width, generator=torch.Generator().manual_seed(1))
    whole = combine_exp_sums([exp_sums(logits)])
    for blocks in (1, 4):
        step = blocks * SUM_BLOCK
        parts = [exp_sums(logits[:rows, i : i + step]) for i in range(0, width, step)]
        pieces = combine_exp_sums(parts)
        assert torch.equal(pieces.top, whole.top[:rows])
        assert torch.equal(pieces.log_total, whole.log_total[:rows])


def test_hidden_entries_count_for_nothing():
    logits = torch.randn(2, 2 * SUM_BLOCK, generator=torch.Generator().manual_seed(2))
    logits[:, SUM_BLOCK:] = float("-inf")
    found = combine_exp_sums([exp_sums(logits, with_moments=False)])
    expected = logits[:, :SUM_BLOCK].logsumexp(-1)
    torch.testing.assert_close(found.top + found.log_total, expected)
