"""What a request means for one model: checked, with limits and stop tokens resolved.

Everything that can be wrong with a single request is found here, before it is queued.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field

import numpy as np

from tandem.errors import ConfigError, DataError
from tandem.inference.embedded.sampler import SamplingRow
from tandem.inference.stopping import Decoder, StopStrings
from tandem.models.cache import BLOCK, block_keys
from tandem.types import LLMRequest

SEED_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the served model can take. ``decoder`` is ``None`` if the model has no tokenizer."""

    vocab_size: int
    max_context: int
    eos_ids: tuple[int, ...]
    decoder: Decoder | None


@dataclass(slots=True)
class Job:
    """One accepted request and what it has besides its tokens.

    ``limit`` bounds prompt plus completion, in tokens; ``prefixes`` names the beginnings of the
    prompt that others may share, as (tokens, key), shortest first; ``held`` are its blocks in the
    prefix store; ``is_mixed`` says that its cache was partly made under older weights.
    """

    ticket: int
    request: LLMRequest
    limit: int
    sampling: SamplingRow
    stop_strings: StopStrings | None
    submitted: float
    arrival: int
    prefixes: list[tuple[int, bytes]]
    held: list[int] = field(default_factory=list)
    is_mixed: bool = False
    prompt_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)

    @property
    def prompt_length(self) -> int:
        return len(self.request.input_ids)

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Until they are complete, no part of the prompt may be taken from elsewhere."""
        return self.request.prompt_logprobs and len(self.prompt_logprobs) < self.prompt_length


def accept(
    ticket: int, request: LLMRequest, limits: ModelLimits, *, now: float, arrival: int
) -> Job:
    """Resolve ``request``.

    Raises:
        ConfigError: an option that this backend cannot honour.
        DataError: an empty or overlong prompt, or a token id outside the vocabulary.
    """
    config = request.gconfig
    if config.n_samples != 1:
        raise ConfigError(
            f"gconfig.n_samples: got {config.n_samples}, a backend completes one sample a request; "
            "send one request with a seed of its own for every sample"
        )
    if config.stop and limits.decoder is None:
        raise ConfigError(
            f"gconfig.stop: got {list(config.stop)}, but the model directory has no tokenizer to "
            "find strings with; use stop_token_ids, or save the tokenizer beside the model"
        )
    _check_ids("input_ids", request.input_ids, limits.vocab_size)
    _check_ids("gconfig.stop_token_ids", config.stop_token_ids, limits.vocab_size)
    _check_ids("gconfig.logit_bias", tuple(config.logit_bias), limits.vocab_size)
    ends = (() if config.ignore_eos else limits.eos_ids) + config.stop_token_ids
    seed = secrets.randbits(64) if config.seed is None else config.seed & SEED_MASK
    return Job(
        ticket=ticket,
        request=request,
        limit=_limit(request, limits),
        sampling=SamplingRow(
            config,
            seed,
            tuple(sorted(set(ends))),
            raw=request.raw_logprobs,
            top=request.top_logprobs,
        ),
        stop_strings=StopStrings(limits.decoder, config.stop)
        if config.stop and limits.decoder is not None
        else None,
        submitted=now,
        arrival=arrival,
        prefixes=_prefixes(request.input_ids),
    )


def _prefixes(ids: tuple[int, ...]) -> list[tuple[int, bytes]]:
    """Every full block of the prompt, and the whole of it."""
    tokens = np.array(ids, dtype=np.int64)
    keys = block_keys(tokens)
    found = [((index + 1) * BLOCK, key) for index, key in enumerate(keys)]
    rest = tokens[len(keys) * BLOCK :]
    if len(rest):
        before = keys[-1] if keys else b""
        found.append((len(ids), hashlib.sha256(before + b"rest" + rest.tobytes()).digest()))
    return found


def _limit(request: LLMRequest, limits: ModelLimits) -> int:
    config, length = request.gconfig, len(request.input_ids)
    if length == 0:
        raise DataError(
            f"request {request.rid}: input_ids is empty, at least one token is needed to predict "
            "from; add a BOS token to the prompt"
        )
    if length + 1 > limits.max_context:
        raise DataError(
            f"request {request.rid}: a prompt of {length} tokens and one new token exceed the "
            f"context of {limits.max_context} tokens; shorten the prompt or raise max_context"
        )
    if config.max_tokens is not None and length + 1 > config.max_tokens:
        raise DataError(
            f"request {request.rid}: a prompt of {length} tokens and one new token exceed "
            f"gconfig.max_tokens={config.max_tokens}; shorten the prompt or raise max_tokens"
        )
    budget = length + config.max_new_tokens
    return min(budget, config.max_tokens or budget, limits.max_context)


def _check_ids(field: str, ids: tuple[int, ...], vocab_size: int) -> None:
    if not ids or ({type(i) for i in ids} == {int} and min(ids) >= 0 and max(ids) < vocab_size):
        return
    wrong = next(i for i in ids if type(i) is not int or not 0 <= i < vocab_size)
    raise DataError(
        f"{field}: got token {wrong!r}, allowed: integers from 0 to {vocab_size - 1}; was the "
        "prompt encoded with another tokenizer?"
    )
