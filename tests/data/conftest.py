from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerBase

from tandem.models.tiny import character_tokenizer


@pytest.fixture(scope="session")
def characters() -> PreTrainedTokenizerBase:
    return character_tokenizer("abcdefghijklmnopqrstuvwxyz 0123456789+=>é\n")


@pytest.fixture(scope="session")
def letters() -> PreTrainedTokenizerBase:
    return character_tokenizer("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ>")
