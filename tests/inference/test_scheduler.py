"""Admission, preemption, chunks and sharing: what is computed, in which order, and what is left."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from torch import Tensor

from tandem.errors import DataError
from tandem.inference.embedded.core import EmbeddedCore
from tandem.types import LLMRequest, LLMResponse, WeightVersion
from tandem.weights import release

from .conftest import MakeCore, Scorer, commit, request, run
from .test_core import assert_logprobs_agree, prompts
from .test_updates import CHANNEL, published


def drain_checked(core: EmbeddedCore, count: int) -> dict[int, LLMResponse]:
    """Every block is accounted for after every step, and at the end none is in use."""
    outcomes = {}
    while len(outcomes) < count:
        for item in core.step():
            assert isinstance(item.outcome, LLMResponse), item.outcome
            outcomes[item.ticket] = item.outcome
        core.check()
    assert core._scheduler.free_blocks == core._scheduler.capacity
    assert not core.has_work
    return outcomes


def start(core: EmbeddedCore, given: list[LLMRequest], first: int = 0) -> None:
    for ticket, item in enumerate(given, first):
        core.add(ticket, item)


def test_two_thousand_requests_pass_through_a_cache_for_fifty(make_core: MakeCore) -> None:
    """Every prompt has its own beginning; prompts and completions fit 32 tokens."""
    core = make_core(cache_tokens=50 * 32, prefix_cache_mib=1)
    draw = random.Random(1)
    given = [
        request(
            [draw.randrange(4, 50) for _ in range(draw.randint(4, 26))],
            str(i),
            seed=i,
            max_new_tokens=draw.randint(1, 6),
            ignore_eos=True,
        )
        for i in range(2000)
    ]
    start(core, given)
    outcomes = drain_checked(core, 2000)
    for ticket, item in enumerate(given):
        assert len(outcomes[ticket].output_tokens) == item.gconfig.max_new_tokens
    assert core.counters.finished == 2000


def test_a_full_cache_sends_the_last_ones_back_and_changes_no_token(
    make_core: MakeCore, score: Scorer
) -> None:
    given = [
        request(prompt, str(i), seed=i, max_new_tokens=60, ignore_eos=True)
        for i, prompt in enumerate(prompts(8, low=10, high=20))
    ]
    expected = run(make_core(), given)
    core = make_core(cache_tokens=8 * 48)
    start(core, given)
    outcomes = drain_checked(core, 8)
    assert core.counters.preempted > 0
    for ticket, response in enumerate(expected):
        assert outcomes[ticket].output_tokens == response.output_tokens
        assert_logprobs_agree(
            outcomes[ticket].output_logprobs,
            score(given[ticket].input_ids, response.output_tokens, 1.0),
        )


def test_the_first_to_come_is_never_preempted(make_core: MakeCore) -> None:
    core = make_core(cache_tokens=128)
    start(core, [request((5 + i,) * 9, max_new_tokens=100, ignore_eos=True) for i in range(4)])
    ended = []
    while core.has_work:
        ended += [item.ticket for item in core.step()]
        assert core.num_waiting == 0 or 0 in ended or core._lanes.jobs[0].ticket == 0
        core.check()
    assert core.counters.preempted > 0
    assert ended[0] == 0


def test_requests_are_admitted_in_order_even_if_a_later_one_would_fit(make_core: MakeCore) -> None:
    core = make_core(cache_tokens=128)
    start(
        core,
        [
            request((5,) * 60, max_new_tokens=30, ignore_eos=True),
            request((6,) * 70, max_new_tokens=2),
            request((7,), max_new_tokens=2),
        ],
    )
    core.step()
    assert (core.num_running, core.num_waiting) == (1, 2)
    drain_checked(core, 3)


def test_a_prompt_that_the_cache_cannot_hold_is_refused_and_others_go_on(
    make_core: MakeCore,
) -> None:
    core = make_core(cache_tokens=64)
    with pytest.raises(DataError, match="context of 64 tokens"):
        core.add(0, request([5] * 64))
    core.add(1, request([5] * 63, max_new_tokens=9, ignore_eos=True))
    outcomes = drain_checked(core, 1) if core.has_work else {}
    assert len(outcomes[1].output_tokens) == 1


def test_a_pass_keeps_to_its_budget_and_running_requests_go_on(make_core: MakeCore) -> None:
    core = make_core(max_tokens_per_pass=16)
    start(core, [request((5, 6), seed=1, max_new_tokens=40, ignore_eos=True)])
    core.step()
    start(core, [request(range(4, 49), seed=2, max_new_tokens=2, ignore_eos=True)], first=1)
    computed = []
    for _ in range(3):
        before = core.counters.prefill_tokens, core.counters.tokens
        core.step()
        computed.append(
            (core.counters.prefill_tokens - before[0], core.counters.tokens - before[1])
        )
    assert computed == [(15, 1), (15, 1), (15, 2)]
    drain_checked(core, 2)


@pytest.mark.parametrize("budget", [3, 16, 50])
def test_chunked_prompts_give_the_tokens_of_whole_ones(
    make_core: MakeCore, score: Scorer, budget: int
) -> None:
    given = [
        request(prompt, seed=i, max_new_tokens=3 + i, ignore_eos=True)
        for i, prompt in enumerate(prompts(9, high=90))
    ]
    core = make_core(max_tokens_per_pass=budget, max_batch_size=4)
    start(core, given)
    outcomes = drain_checked(core, 9)
    for ticket, item in enumerate(given):
        response = outcomes[ticket]
        assert_logprobs_agree(
            response.output_logprobs, score(item.input_ids, response.output_tokens, 1.0)
        )


def test_samples_of_a_prompt_that_come_later_compute_one_token_each(
    make_core: MakeCore, score: Scorer
) -> None:
    prompt = tuple(4 + i % 40 for i in range(75))
    given = [request(prompt, seed=i, max_new_tokens=12, ignore_eos=True) for i in range(6)]
    core = make_core()
    for ticket, item in enumerate(given):
        core.add(ticket, item)
        core.step()
    assert core.counters.prefill_tokens == 75 + 5
    outcomes = drain_checked(core, 6)
    for item in outcomes.values():
        assert_logprobs_agree(item.output_logprobs, score(prompt, item.output_tokens, 1.0))


def test_prompts_with_a_common_beginning_share_it_within_one_pass(
    make_core: MakeCore, score: Scorer
) -> None:
    common = tuple(4 + i % 40 for i in range(50))
    given = [
        request((*common, 5 + i, 6), seed=i, max_new_tokens=5, ignore_eos=True) for i in range(4)
    ]
    core = make_core()
    start(core, given)
    core.step()
    assert core.counters.prefill_tokens == 52 + 3 * (52 - 48)
    outcomes = drain_checked(core, 4)
    for ticket, item in enumerate(given):
        assert_logprobs_agree(
            outcomes[ticket].output_logprobs,
            score(item.input_ids, outcomes[ticket].output_tokens, 1.0),
        )


def test_a_conversation_goes_on_from_the_blocks_of_its_last_turn(
    make_core: MakeCore, score: Scorer
) -> None:
    core = make_core()
    (first,) = run(core, [request(range(4, 44), seed=1, max_new_tokens=30, ignore_eos=True)])
    turn = (*range(4, 44), *first.output_tokens, 7, 8)
    before = core.counters.prefill_tokens
    (second,) = run(core, [request(turn, seed=2, max_new_tokens=5, ignore_eos=True)])
    assert core.counters.prefill_tokens - before == 72 - 64
    assert core.shared_tokens == 64
    assert_logprobs_agree(second.output_logprobs, score(turn, second.output_tokens, 1.0))


def test_without_a_prefix_cache_nothing_is_kept(make_core: MakeCore) -> None:
    core = make_core(prefix_cache_mib=0)
    for _ in range(2):
        run(core, [request(range(4, 44), max_new_tokens=2)])
    assert core.counters.prefill_tokens == 80
    core.check()


@pytest.mark.parametrize("kv_on_update", ["recompute", "keep"])
def test_no_prefix_survives_an_update(
    make_core: MakeCore,
    other_weights: Mapping[str, Tensor],
    kv_on_update: str,
) -> None:
    """A request that began under the old weights must not feed the store under the new ones."""
    core = make_core(kv_on_update=kv_on_update)
    old = request(range(4, 44), seed=1, max_new_tokens=30, ignore_eos=True)
    core.add(0, old)
    core.step()
    commit(core, published(1, other_weights))
    release(CHANNEL)
    drain_checked(core, 1)
    before = core.counters.prefill_tokens, core.shared_tokens
    run(core, [old])
    shared = core.shared_tokens - before[1]
    assert shared == (32 if kv_on_update == "recompute" else 0)
    assert core.counters.prefill_tokens - before[0] == 40 - shared


def test_an_update_recomputes_a_shared_prompt_once(
    make_core: MakeCore, other_weights: Mapping[str, Tensor]
) -> None:
    core = make_core()
    start(
        core, [request(range(4, 44), seed=i, max_new_tokens=9, ignore_eos=True) for i in range(6)]
    )
    for _ in range(4):
        core.step()
    before = core.counters.prefill_tokens
    commit(core, published(1, other_weights))
    release(CHANNEL)
    core.step()
    distinct = len({core._lanes.tokens[row, :44].tobytes() for row in range(6)})
    assert core.counters.prefill_tokens - before == 44 + 4 * (distinct - 1)
    drain_checked(core, 6)


def test_rows_in_the_middle_of_their_prompt_keep_their_place_when_others_leave(
    make_core: MakeCore, score: Scorer
) -> None:
    core = make_core(max_tokens_per_pass=20)
    given = [
        request((5, 6), seed=1, max_new_tokens=3, ignore_eos=True),
        request((7, 6), seed=2, max_new_tokens=30, ignore_eos=True),
        request(range(4, 49), seed=3, max_new_tokens=6, ignore_eos=True),
        request(range(9, 49), seed=4, max_new_tokens=6, ignore_eos=True),
    ]
    start(core, given)
    outcomes = drain_checked(core, 4)
    for ticket, item in enumerate(given):
        assert_logprobs_agree(
            outcomes[ticket].output_logprobs,
            score(item.input_ids, outcomes[ticket].output_tokens, 1.0),
        )


def test_aborted_and_waiting_requests_leave_no_block_behind(make_core: MakeCore) -> None:
    core = make_core(cache_tokens=128, max_tokens_per_pass=24)
    start(core, [request((5 + i,) * 30, max_new_tokens=20) for i in range(8)])
    for _ in range(3):
        core.step()
    assert len(core.abort_all()) == 8
    core.check()
    assert core._scheduler.free_blocks == core._scheduler.capacity


def test_an_aborted_request_that_was_sent_back_keeps_what_it_made(make_core: MakeCore) -> None:
    core = make_core(cache_tokens=96)
    start(core, [request((5 + i,) * 9, seed=i, max_new_tokens=80, ignore_eos=True) for i in (0, 1)])
    while not core.counters.preempted:
        core.step()
    (aborted,) = core.abort({1})
    assert aborted.outcome.stop_reason == "abort"
    assert len(aborted.outcome.output_tokens) > 20
    assert aborted.outcome.output_versions == [0] * len(aborted.outcome.output_tokens)
    drain_checked(core, 1)


def test_a_version_is_that_of_the_step_even_for_requests_that_were_sent_back(
    make_core: MakeCore,
) -> None:
    core = make_core(cache_tokens=96)
    start(core, [request((5 + i,) * 9, seed=i, max_new_tokens=70, ignore_eos=True) for i in (0, 1)])
    while not core.counters.preempted:
        core.step()
    core.set_version(WeightVersion("inc", 1))
    outcomes = drain_checked(core, 2)
    for response in outcomes.values():
        assert len(response.output_versions) == 70
        assert response.output_versions == sorted(response.output_versions)
        assert set(response.output_versions) == {0, 1}


def test_chunks_shared_prefixes_and_preemption_do_not_change_a_bit(make_core: MakeCore) -> None:
    common = tuple(4 + i % 40 for i in range(37))
    given = [
        request((*common[: 9 * i], 5 + i, 6), seed=i, max_new_tokens=30, ignore_eos=True)
        for i in range(1, 5)
    ]
    plain = run(make_core(prefix_cache_mib=0, max_batch_size=1), given)
    core = make_core(max_tokens_per_pass=13, cache_tokens=128)
    for _ in range(2):
        start(core, given)
        outcomes = drain_checked(core, 4)
        for ticket, response in enumerate(plain):
            assert outcomes[ticket].output_tokens == response.output_tokens
            assert outcomes[ticket].output_logprobs == response.output_logprobs
    assert core.counters.preempted > 0
    assert core.shared_tokens > 0
