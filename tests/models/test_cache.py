"""Blocks, the prefix store and attention over rows, against plain computations."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.models.cache import (
    BLOCK,
    BlockPool,
    CacheContext,
    ChunkGroup,
    KVCache,
    PrefixStore,
    RowCopy,
    block_keys,
    num_blocks,
)
from tandem.types import WeightVersion
from tests.tolerance import assert_close

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def test_a_key_is_the_sha256_of_all_tokens_up_to_the_end_of_its_block() -> None:
    tokens = np.arange(2 * BLOCK + 5)
    first = hashlib.sha256(tokens[:BLOCK].tobytes()).digest()
    second = hashlib.sha256(first + tokens[BLOCK : 2 * BLOCK].tobytes()).digest()
    assert block_keys(tokens) == [first, second]
    assert block_keys(tokens, [first]) == [first, second]
    tokens[0] += 1
    assert set(block_keys(tokens)).isdisjoint({first, second})


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (BLOCK, 1), (BLOCK + 1, 2)])
def test_blocks_are_counted_up(tokens: int, blocks: int) -> None:
    assert num_blocks(tokens) == blocks


def test_only_an_unbroken_run_of_blocks_is_found() -> None:
    pool = BlockPool(4)
    a, c = pool.file("a"), pool.file("c")
    assert pool.find(["a", "b", "c"]) == [a]
    b = pool.file("b")
    assert pool.find(["a", "b", "c", "d"]) == [a, b, c]
    pool.check([[a, b, c]])


def test_a_block_is_evicted_when_nobody_holds_it_and_the_longest_idle_goes_first() -> None:
    pool = BlockPool(2)
    a, b = pool.file("a"), pool.file("b")
    assert pool.file("c") is None
    pool.release([b])
    pool.release([a])
    assert pool.file("c") == b
    assert pool.find(["b"]) == []
    assert pool.find(["a"]) == [a]
    pool.hold([a])
    assert pool.file("d") is None
    pool.check([[a], [b]])


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    pool = BlockPool(3)
    blocks = [pool.file(key) for key in "abc"]
    pool.release(blocks)
    pool.file("x")
    assert pool.find("abc") == blocks[:2]


def test_cleared_blocks_are_unknown_at_once_and_free_when_their_last_user_is_gone() -> None:
    pool = BlockPool(2)
    a = pool.file("a")
    pool.release([pool.file("b")])
    pool.clear()
    assert pool.find(["a"]) == pool.find(["b"]) == []
    again = pool.file("a")
    assert again != a
    pool.check([[a], [again]])
    pool.release([a])
    assert (pool.num_held, pool.num_idle) == (1, 0)
    pool.check([[again]])


def test_a_leak_is_noticed() -> None:
    pool = BlockPool(2)
    pool.file("a")
    with pytest.raises(AssertionError):
        pool.check([])


def test_random_use_loses_no_block() -> None:
    draw, pool, users = random.Random(3), BlockPool(9), []
    for _ in range(2000):
        action = draw.random()
        if action < 0.5:
            keys = [f"{draw.randrange(4)}/{i}" for i in range(draw.randint(1, 5))]
            held = pool.find(keys)
            pool.hold(held)
            for key in keys[len(held) :]:
                if pool.find([key]):
                    break
                block = pool.file(key)
                if block is None:
                    break
                held.append(block)
            users.append(held)
        elif action < 0.98 and users:
            pool.release(users.pop(draw.randrange(len(users))))
        elif action >= 0.98:
            pool.clear()
        pool.check(users)


def filled_cache(rows: int, length: int) -> KVCache:
    cache = KVCache()
    cache.reserve([length] * rows)
    like = torch.zeros(1, KV_HEADS, 1, WIDTH)
    for layer in range(2):
        cache.see(layer, like, like, None)
    for item in stored(cache):
        item.copy_(torch.randn(item.shape))
    return cache


def stored(cache: KVCache) -> list[Tensor]:
    return [item for shelf in cache.shelves for item in shelf.tensors]


def test_blocks_come_back_from_the_store_as_they_were_filed() -> None:
    cache, store, version = filled_cache(3, 64), PrefixStore(8), WeightVersion("inc", 0)
    keys = block_keys(np.arange(3 * BLOCK))
    held = store.file(cache, 1, version, keys)
    assert len(held) == 3
    assert store.match(version, keys) == held
    before = [item[1, :, : 2 * BLOCK].clone() for item in stored(cache)]
    store.load(cache, 2, held[:2])
    after = [item[2, :, : 2 * BLOCK] for item in stored(cache)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_blocks_of_other_weights_are_not_found() -> None:
    cache, store = filled_cache(1, 64), PrefixStore(8)
    keys = block_keys(np.arange(BLOCK))
    store.file(cache, 0, WeightVersion("inc", 0), keys)
    assert store.match(WeightVersion("inc", 1), keys) == []
    assert store.match(WeightVersion("other", 0), keys) == []


def test_a_full_store_files_what_it_can() -> None:
    cache, store = filled_cache(1, 64), PrefixStore(2)
    keys = block_keys(np.arange(3 * BLOCK))
    assert len(store.file(cache, 0, WeightVersion("inc", 0), keys)) == 2


def test_the_store_grows_and_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.models.cache.prefix.FIRST_SLOTS", 1)
    cache, store, version = filled_cache(4, 64), PrefixStore(16), WeightVersion("inc", 0)
    chains = [block_keys(np.arange(2 * BLOCK) + 100 * row) for row in range(4)]
    held = [store.file(cache, row, version, chains[row]) for row in range(4)]
    expected = [item[:, :, : 2 * BLOCK].clone() for item in stored(cache)]
    for row in range(4):
        store.load(cache, 3 - row, held[row])
    found = [item[:, :, : 2 * BLOCK] for item in stored(cache)]
    assert all(torch.equal(a, b.flip(0)) for a, b in zip(expected, found, strict=True))


# --- rows ---


def test_rows_keep_what_they_hold_while_they_grow_leave_and_change_order() -> None:
    draw, cache = random.Random(5), filled_cache(1, 1)
    held: list[list[list[Tensor]]] = [[]]  # by row and token, what every tensor has there

    def at(row: int, token: int) -> list[Tensor]:
        shelf, slot = cache.locate(row)
        return [item[slot, :, token] for item in shelf.tensors]

    for _ in range(100):
        lengths = [len(row) + draw.choice((0, 1, 30)) for row in held]
        lengths += [draw.randrange(1, 90) for _ in range(draw.choice((0, 0, 1, 3)))]
        held += [[] for _ in range(len(lengths) - len(held))]
        cache.reserve(lengths)
        for row, length in enumerate(lengths):
            for token in range(len(held[row]), length):
                for place in at(row, token):
                    place.copy_(torch.randn(place.shape))
                held[row].append([place.clone() for place in at(row, token)])
        order = draw.sample(range(len(held)), draw.randrange(max(0, len(held) - 2), len(held) + 1))
        order = [row for row in order if len(held[row]) < 400]
        cache.keep(order)
        held = [held[row] for row in order]
        for row, tokens in enumerate(held):
            for token in draw.sample(range(len(tokens)), min(len(tokens), 5)):
                pairs = zip(tokens[token], at(row, token), strict=True)
                assert all(torch.equal(a, b) for a, b in pairs)
        assert sorted(cache.order) == list(range(len(held)))


def test_a_long_row_does_not_make_the_others_longer() -> None:
    cache = filled_cache(30, 64)
    cache.reserve([64] * 29 + [65])
    cache.reserve([64] * 29 + [4096])
    assert cache.size_bytes == (30 * 64 + 128 + 4096) * cache.token_bytes
    assert [(shelf.length, len(shelf.rows)) for shelf in cache.shelves] == [(64, 29), (4096, 1)]


def test_a_large_shelf_without_rows_frees_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.models.cache.rows.KEPT_SHELF_BYTES", 1000)
    cache = filled_cache(3, 64)
    cache.reserve([65] * 3)
    assert cache.size_bytes == 3 * 128 * cache.token_bytes
    cache.keep([])
    assert cache.size_bytes == 0
    cache.reserve([10])
    assert cache.size_bytes == 64 * cache.token_bytes


# --- attention ---


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, scaling: float
) -> Tensor:
    """Of one whole sequence ``[heads, T, D]``, in fp64."""
    query, key, value = query.double(), key.double(), value.double()
    key = key.repeat_interleave(HEADS // KV_HEADS, 0)
    value = value.repeat_interleave(HEADS // KV_HEADS, 0)
    scores = query @ key.transpose(1, 2) * scaling
    index = torch.arange(query.shape[1])
    distance = index[:, None] - index
    hidden = (distance < 0) | (distance >= (window or 10**9))
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value).float()


def sequence(length: int) -> tuple[Tensor, Tensor, Tensor]:
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return tuple(torch.randn(count, length, WIDTH) for count in heads)


def packed(*parts: tuple[Tensor, ...]) -> list[Tensor]:
    return [torch.cat(items, dim=1)[None] for items in zip(*parts, strict=True)]


def part(items: tuple[Tensor, ...], start: int, stop: int) -> tuple[Tensor, ...]:
    return tuple(item[:, start:stop] for item in items)


@pytest.mark.parametrize("window", [None, 3, 20, 600])
def test_decoding_beside_chunks_and_copies_equals_plain_attention(window: int | None) -> None:
    """Row 0 decodes its last token; row 1 goes on in a chunk; row 2 is new; row 3 takes its first
    19 tokens over from row 2, which this same pass computes."""
    a, b, c, d = sequence(700), sequence(30), sequence(24), sequence(21)
    for new, old in zip(d, c, strict=True):
        new[:, :19] = old[:, :19]
    cache = KVCache()
    cache.reserve([700, 30, 24, 21])

    def attend(context: CacheContext, parts: list[Tensor]) -> Tensor:
        return context.attend(0, *parts, scaling=0.3, sliding_window=window)

    groups = [ChunkGroup(0, 0, 699, (0,)), ChunkGroup(699, 0, 11, (1,))]
    first = CacheContext(cache, groups=groups)
    attend(first, packed(part(a, 0, 699), part(b, 0, 11)))
    second = CacheContext(
        cache,
        positions=np.array([699]),
        groups=[
            ChunkGroup(1, 11, 30, (1,)),
            ChunkGroup(20, 0, 24, (2,)),
            ChunkGroup(44, 19, 21, (3,)),
        ],
        copies=[RowCopy(2, (3,), 19)],
    )
    out = attend(second, packed(part(a, 699, 700), part(b, 11, 30), c, part(d, 19, 21)))[0]
    whole = [plain_attention(*items, window, 0.3) for items in (a, b, c, d)]
    expected = torch.cat([whole[0][:, 699:], whole[1][:, 11:], whole[2], whole[3][:, 19:]], dim=1)
    assert_close(out, expected)


@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("window", [None, 70])
def test_rows_of_all_lengths_decode_together(window: int | None, is_fast: bool) -> None:
    """On three shelves, with rows in between that do not decode, and touching nothing of theirs."""
    lengths = [20, 300, 64, 100, 7, 128, 64, 33]
    sequences = [sequence(length) for length in lengths]
    cache = KVCache()
    cache.reserve([1] * 8)
    groups, offset = [], 0
    for row, length in enumerate(lengths[:6]):
        groups.append(ChunkGroup(offset, 0, length - 1, (row,)))
        offset += length - 1

    def attend(context: CacheContext, parts: list[Tensor]) -> Tensor:
        return context.attend(0, *parts, scaling=0.3, sliding_window=window)[0]

    cache.reserve([*lengths[:6], 1, 1])
    attend(
        CacheContext(cache, groups=groups, is_fast=is_fast),
        packed(*(part(s, 0, n - 1) for s, n in zip(sequences[:6], lengths, strict=False))),
    )
    cache.keep([5, 0, 4, 1, 2, 6, 7, 3])  # rows 5 and 6 of these have nothing yet
    lengths = [lengths[row] for row in (5, 0, 4, 1, 2)]
    sequences = [sequences[row] for row in (5, 0, 4, 1, 2)]
    others = [item[slot] for shelf, slot in map(cache.locate, (5, 6, 7)) for item in shelf.tensors]
    before = [item.clone() for item in others]
    context = CacheContext(cache, positions=np.array(lengths) - 1, is_fast=is_fast)
    assert len(context.decoded.sizes) == 2 * 3
    out = attend(
        context, packed(*(part(s, n - 1, n) for s, n in zip(sequences, lengths, strict=True)))
    )
    whole = [plain_attention(*items, window, 0.3)[:, -1:] for items in sequences]
    assert_close(out, torch.cat(whole, dim=1))
    assert all(torch.equal(a, b) for a, b in zip(before, others, strict=True))


def test_rows_take_over_the_whole_length_of_another() -> None:
    cache, parts = KVCache(), packed(sequence(64))
    cache.reserve([64] * 3)
    context = CacheContext(
        cache,
        groups=[ChunkGroup(0, 0, 64, (1,))],
        copies=[RowCopy(1, (0, 2), 64)],
    )
    context.attend(0, *parts, scaling=0.3, sliding_window=None)
    for item, given in zip(stored(cache), parts[1:], strict=True):
        assert all(torch.equal(item[row], given[0]) for row in range(3))


def test_filler_tokens_have_no_attention_and_touch_nothing() -> None:
    cache = filled_cache(2, 64)
    before = [item.clone() for item in stored(cache)]
    context = CacheContext(cache, positions=np.array([5]))
    q, k, v = packed(sequence(4))
    out = context.attend(0, q, k, v, scaling=0.3, sliding_window=None)
    assert torch.equal(out[:, :, 1:], torch.zeros(1, HEADS, 3, WIDTH))
    changed = [
        (x != y).any(-1).any(1).nonzero().tolist()
        for x, y in zip(before, stored(cache), strict=True)
    ]
    assert changed == [[[0, 5]], [], [[0, 5]], []]


def test_a_dropped_cache_remembers_its_layers() -> None:
    cache = filled_cache(2, 64)
    size = cache.token_bytes
    cache.drop()
    assert (cache.size_bytes, cache.num_layers, cache.token_bytes) == (0, 2, size)
    assert size == 2 * 2 * KV_HEADS * WIDTH * 4
    cache.reserve([10])
    assert cache.size_bytes == 64 * size
