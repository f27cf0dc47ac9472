"""The self-test of deterministic mode: do generated log-probabilities have training's bits?

Which kernels are invariant depends on the processor, the thread count and the model's sizes, so it
is measured, on the model that will serve, before the first request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.errors import CapabilityError
from tandem.inference.embedded.core import EmbeddedCore
from tandem.models.head import token_logprobs
from tandem.models.packed import PackedContext
from tandem.types import GenerationConfig, LLMRequest, LLMResponse

PROMPT_LENGTHS = (1, 23, 60, 290)
"""Prompts of the test: below a matrix tile, about one, and beyond one block of keys."""
NEW_TOKENS = 12


@torch.inference_mode()
def check_bits(core: EmbeddedCore) -> None:
    """Generate beside other sequences and alone, and compare with a packed pass of training.

    Raises:
        CapabilityError: a log-probability differs in any bit.
    """
    requests = _requests(core)
    together = _generate(core, requests)
    alone = _generate(core, requests[:1])
    packed = _packed_logprobs(core, together)
    made = torch.tensor([lp for response in together for lp in response.output_logprobs])
    worst = float((packed - made).abs().max())
    is_same = together[0].output_logprobs == alone[0].output_logprobs
    if worst != 0.0 or not is_same:
        found = f"up to {worst:.2g} from training's" if worst else "changed by the batch around it"
        raise CapabilityError(
            f"inference.deterministic: on this machine {type(core.model).__name__}'s generated "
            f"log-probabilities are {found}, allowed: 0; use one thread a process, or "
            "inference.deterministic=false"
        )


def _requests(core: EmbeddedCore) -> list[LLMRequest]:
    vocabulary = core.limits.vocab_size
    room = max(1, core.limits.max_context - NEW_TOKENS)
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, temperature=0.7, ignore_eos=True, seed=1)
    return [
        LLMRequest(
            f"bits-{n}", tuple((7 * i + n) % vocabulary for i in range(min(n, room))), config
        )
        for n in PROMPT_LENGTHS
    ]


def _generate(core: EmbeddedCore, requests: list[LLMRequest]) -> list[LLMResponse]:
    for ticket, request in enumerate(requests):
        core.add(ticket, request)
    found: dict[int, LLMResponse] = {}
    while core.has_work:
        for done in core.step():
            if isinstance(done.outcome, Exception):
                raise done.outcome
            found[done.ticket] = done.outcome
    return [found[ticket] for ticket in range(len(requests))]


def _packed_logprobs(core: EmbeddedCore, responses: list[LLMResponse]) -> Tensor:
    """What training computes for the generated tokens of all responses, packed together."""
    rows = [[*response.input_tokens, *response.output_tokens] for response in responses]
    lengths = [len(row) for row in rows]
    positions = torch.cat([torch.arange(length) for length in lengths])
    tokens = torch.tensor([token for row in rows for token in row])
    model = core.model
    hidden = model.base_model(
        input_ids=tokens[None],
        position_ids=positions[None],
        ctx=PackedContext(lengths),
        use_cache=False,
    ).last_hidden_state[0]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    index = torch.cat([torch.arange(end - NEW_TOKENS, end) for end in ends])
    head = model.get_output_embeddings()
    logprobs, _ = token_logprobs(
        hidden[index - 1],
        head.weight,
        tokens[index],
        torch.full(index.shape, 0.7),
        with_entropy=False,
        chunk=max(16, (1 << 18) // head.weight.shape[0]),
        bias_V=head.bias,
    )
    return logprobs
