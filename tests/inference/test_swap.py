"""New weights beside running steps: what serves meanwhile, what is refused, what is given back."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem.errors import WeightSyncError
from tandem.inference.embedded import EmbeddedBackend
from tandem.inference.embedded.core import EmbeddedCore
from tandem.inference.embedded.filler import NICENESS, _work_aside
from tandem.inference.embedded.linears import _stacked
from tandem.inference.embedded.weights import ALIGNMENT, ModelWeights
from tandem.types import LLMResponse, WeightUpdateMeta, WeightVersion
from tandem.weights import Published, expect, release
from tandem.weights.bucket import fill_bucket, go_on, plan_bucket
from tandem.weights.manifest import MemoryLocation
from tandem.weights.transports import shared_memory
from tandem.weights.transports.inprocess import Buffer

from .conftest import MakeCore, commit, drain, request, run
from .test_updates import send

CHANNEL = "test-swap"
LONG = request((5, 6, 7), seed=8, max_new_tokens=60, ignore_eos=True)


@pytest.fixture(autouse=True)
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A root of its own for shared memory."""
    root = tmp_path / "shm"
    root.mkdir()
    monkeypatch.setattr(shared_memory, "shared_root", lambda: root)
    yield root
    release(CHANNEL)


def update_meta(version: int, kind: str = "inprocess", path: str | None = None) -> WeightUpdateMeta:
    return WeightUpdateMeta(kind, version, incarnation="inc", channel=CHANNEL, path=path)


def published(
    version: int, weights: Mapping[str, Tensor], kind: str = "inprocess", path: str | None = None
) -> Published:
    meta = update_meta(version, kind, path)
    arrival = expect(meta)
    send(meta, weights)
    return arrival.result(0)


# --- which weights make which token ---


@pytest.mark.parametrize("numerics", ["matched", "fast"])
def test_the_old_weights_serve_until_the_border_and_the_new_ones_from_it_on(
    make_core: MakeCore,
    other_weights: Mapping[str, Tensor],
    other_model_dir: Path,
    numerics: str,
) -> None:
    core = make_core(numerics=numerics)
    core.add(0, LONG)
    new = core.weights.fill(published(1, other_weights), lambda: core.step())
    made = int(core.counters.tokens)
    assert 20 < made < 60
    old = core.exchange(new)
    old.release()
    (response,) = drain(core, 1)
    assert response.output_versions == [0] * made + [1] * (60 - made)

    (undisturbed,) = run(make_core(numerics=numerics), [LONG])
    assert response.output_tokens[:made] == undisturbed.output_tokens[:made]
    assert response.output_logprobs[:made] == undisturbed.output_logprobs[:made]
    rest = request(
        (*LONG.input_ids, *response.output_tokens[:made]),
        seed=8,
        max_new_tokens=60 - made,
        ignore_eos=True,
    )
    (expected,) = run(make_core(other_model_dir, numerics=numerics), [rest])
    assert response.output_tokens[made:] == expected.output_tokens
    if numerics == "matched":
        assert response.output_logprobs[made:] == expected.output_logprobs
    assert response.output_tokens != undisturbed.output_tokens


def test_kept_caches_go_on_under_the_new_weights(
    make_core: MakeCore, other_weights: Mapping[str, Tensor]
) -> None:
    core = make_core(kv_on_update="keep")
    core.add(0, LONG)
    new = core.weights.fill(published(1, other_weights), lambda: core.step())
    made, prefilled = core.counters.tokens, core.counters.prefill_tokens
    core.exchange(new).release()
    (response,) = drain(core, 1)
    assert response.output_versions == [0] * made + [1] * (60 - made)
    assert core.counters.prefill_tokens == prefilled
    assert core.counters.stale_kv_tokens == 60 - made


@pytest.mark.parametrize("damage", ["byte", "name"])
def test_a_refused_update_changes_no_bit_of_what_is_served(
    make_core: MakeCore, other_weights: Mapping[str, Tensor], damage: str
) -> None:
    core = make_core()
    core.add(0, LONG)
    sent = dict(other_weights)
    if damage == "name":
        sent["extra"] = sent.pop("model.norm.weight")
    arrived = published(1, sent)
    buffer = arrived.location.buffer
    if damage == "byte":
        buffer.data[arrived.manifest.tensors[-1].offset] ^= 1
    with pytest.raises(WeightSyncError):
        core.weights.fill(arrived, lambda: core.step())
    (response,) = drain(core, 1)
    (undisturbed,) = run(make_core(), [LONG])
    assert response.output_tokens == undisturbed.output_tokens
    assert response.output_logprobs == undisturbed.output_logprobs
    assert set(response.output_versions) == {0}
    assert buffer._num_readers == 0


# --- whose memory ---


def test_published_tensors_are_the_parameters_and_two_buffers_are_enough(
    make_core: MakeCore, other_weights: Mapping[str, Tensor]
) -> None:
    core = make_core()
    size = sum(item.nbytes for item in other_weights.values())
    assert (core.weights.size_bytes, core.weights.published_bytes) == (size, 0)
    buffers = []
    for version in range(1, 5):
        arrived = published(version, other_weights)
        commit(core, arrived)
        buffers.append(arrived.location.buffer)
        assert (core.weights.size_bytes, core.weights.published_bytes) == (0, size)
    assert buffers[0] is buffers[2]
    assert buffers[1] is buffers[3]
    assert [item._num_readers for item in buffers[:2]] == [0, 1]
    first = core.weights.parameters["model.embed_tokens.weight"]
    assert torch.equal(first, other_weights["model.embed_tokens.weight"])
    core.weights.release()
    assert buffers[1]._num_readers == 0


def test_two_files_of_shared_memory_are_enough_and_none_stays_open(
    make_core: MakeCore, other_weights: Mapping[str, Tensor], shm: Path
) -> None:
    core = make_core()
    files = set()
    for version in range(1, 6):
        commit(core, published(version, other_weights, "shared_memory"))
        files |= {path.stat().st_ino for path in shm.rglob("v*")}
    assert core.weights.published_bytes == sum(item.nbytes for item in other_weights.values())
    assert len(files) == 2
    assert len(_open_files(shm)) == 1
    core.weights.release()
    release(CHANNEL)
    assert not _open_files(shm)
    assert not list(shm.rglob("v*"))


def _open_files(root: Path) -> set[str]:
    """Published files below ``root`` that this process holds open."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    targets = [os.readlink(link) for link in links if os.path.lexists(link)]
    return {target for target in targets if target.startswith(str(root)) and "/v" in target}


def test_files_of_a_disk_are_copied(
    make_core: MakeCore, other_weights: Mapping[str, Tensor], tmp_path: Path
) -> None:
    core = make_core()
    commit(core, published(1, other_weights, "disk", str(tmp_path / "disk")))
    assert core.weights.published_bytes == 0
    assert core.weights.size_bytes == sum(item.nbytes for item in other_weights.values())
    for name, item in core.weights.parameters.items():
        assert torch.equal(item, other_weights[name])


def test_tensors_at_crooked_addresses_are_copied(
    make_core: MakeCore, other_weights: Mapping[str, Tensor]
) -> None:
    core = make_core()
    plan = plan_bucket(update_meta(1), core.weights.specs, packed=False)
    buffer = Buffer(plan.size_bytes + 4)
    buffer.data = buffer.data[4:]
    named = [(spec.name, other_weights[spec.name]) for spec in core.weights.specs]
    manifest = fill_bucket(buffer.data, plan, named)
    commit(core, Published(manifest, MemoryLocation(buffer, buffer.generation)))
    for name, item in core.weights.parameters.items():
        assert item.data_ptr() % ALIGNMENT == 0
        assert torch.equal(item, other_weights[name])
    assert buffer._num_readers == 0


def test_rows_that_lie_one_behind_the_other_are_stacked_without_a_copy() -> None:
    whole = torch.arange(30.0).view(10, 3)
    parts = [whole[:4], whole[4:5], whole[5:]]
    stacked = _stacked(parts)
    assert stacked.data_ptr() == whole.data_ptr()
    assert torch.equal(stacked, whole)
    for given in (parts[::-1], [whole[:4], whole[5:]], [whole[:2], whole[2:].clone()]):
        assert torch.equal(_stacked(given), torch.cat(given))
    transposed = torch.arange(12.0).view(3, 4).t()
    assert torch.equal(_stacked([transposed]), transposed)


# --- through the backend ---


class Gate:
    """Holds every fill of weights between its first two tensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open = threading.Event()
        self.reached = threading.Event()
        fill = ModelWeights.fill

        def held(weights: ModelWeights, arrived: Published, heed: Callable[[], None]) -> object:
            def wait() -> None:
                self.reached.set()
                assert self.is_open.wait(20)
                heed()

            return fill(weights, arrived, wait)

        monkeypatch.setattr(ModelWeights, "fill", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def begin(backend: EmbeddedBackend, version: int, weights: Mapping[str, Tensor]) -> Future[None]:
    future = backend.update_weights(update_meta(version))
    send(update_meta(version), weights)
    return future


def answer(backend: EmbeddedBackend, count: int = 3) -> LLMResponse:
    item = request((5, 6), seed=1, max_new_tokens=count, ignore_eos=True)
    return asyncio.run(backend.generate(item))


def test_requests_begin_and_end_and_are_held_while_new_weights_are_made_ready(
    make_backend: Callable[..., EmbeddedBackend], other_weights: Mapping[str, Tensor], gate: Gate
) -> None:
    backend = make_backend()
    update = begin(backend, 1, other_weights)
    assert gate.reached.wait(20)
    assert answer(backend).output_versions == [0, 0, 0]

    async def abort_one() -> None:
        task = asyncio.create_task(
            backend.generate(request((5,), max_new_tokens=500, ignore_eos=True))
        )
        async with asyncio.timeout(20):
            while backend.stats()["running"] == 0:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while backend.stats()["aborted"] == 0:
                await asyncio.sleep(0)

    asyncio.run(abort_one())
    backend.pause_generation()
    assert backend.version == WeightVersion("inc", 0)
    assert not update.done()
    gate.is_open.set()
    update.result(20)
    assert backend.version == WeightVersion("inc", 1)
    assert backend.stats()["paused"]
    backend.resume_generation()
    assert answer(backend).output_versions == [1, 1, 1]


def test_updates_in_a_row_are_committed_in_their_order(
    make_backend: Callable[..., EmbeddedBackend], other_weights: Mapping[str, Tensor], gate: Gate
) -> None:
    backend = make_backend()
    seen: list[int] = []
    futures = []
    for version in (1, 2):
        futures.append(begin(backend, version, other_weights))
        futures[-1].add_done_callback(lambda _: seen.append(backend.version.n))
    gate.is_open.set()
    for future in futures:
        future.result(20)
    assert seen == [1, 2]


def test_an_update_that_takes_too_long_is_called_off_and_can_be_made_again(
    make_backend: Callable[..., EmbeddedBackend], other_weights: Mapping[str, Tensor], gate: Gate
) -> None:
    backend = make_backend(update_timeout_s=0.3)
    update = begin(backend, 1, other_weights)
    with pytest.raises(WeightSyncError, match="old version serves on"):
        update.result(20)
    assert answer(backend).output_versions == [0, 0, 0]
    gate.is_open.set()
    again = begin(backend, 1, other_weights)
    again.result(20)
    assert answer(backend).output_versions == [1, 1, 1]


def test_what_goes_wrong_while_filling_leaves_the_old_weights_serving(
    make_backend: Callable[..., EmbeddedBackend],
    other_weights: Mapping[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = make_backend()

    def broken(*_: object) -> None:
        raise MemoryError("no room for a second set")

    with monkeypatch.context() as patch:
        patch.setattr(ModelWeights, "fill", broken)
        with pytest.raises(WeightSyncError, match="no room for a second set"):
            begin(backend, 1, other_weights).result(20)
    assert answer(backend).output_versions == [0, 0, 0]
    begin(backend, 1, other_weights).result(20)
    assert answer(backend).output_versions == [1, 1, 1]


def test_closing_ends_the_update_in_hand_and_gives_its_memory_back(
    make_backend: Callable[..., EmbeddedBackend],
    other_weights: Mapping[str, Tensor],
    gate: Gate,
) -> None:
    backend = make_backend()
    engine = backend._engine
    arrived: list[Published] = []
    real = engine.filler.commit
    engine.filler.commit = lambda item: (arrived.append(item), real(item))[1]
    update = begin(backend, 1, other_weights)
    assert gate.reached.wait(20)
    closing = threading.Thread(target=backend.close)
    closing.start()
    assert engine.filler._is_closing.wait(20)
    gate.is_open.set()
    closing.join(20)
    assert not closing.is_alive()
    with pytest.raises(WeightSyncError, match="closed"):
        update.result(20)
    assert arrived[0].location.buffer._num_readers == 0


def test_the_filling_thread_leaves_other_threads_their_cores() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    seen: dict[str, int] = {}

    def fill() -> None:
        for name in ("filling", "again"):
            _work_aside()
            seen[name] = torch.get_num_threads()
        seen["niceness"] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    try:
        for target in (fill, lambda: seen.update(later=torch.get_num_threads())):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    expected = {"filling": 1, "again": 1, "later": 2}
    if sys.platform == "linux":
        own = os.getpriority(os.PRIO_PROCESS, os.getpid())
        expected["niceness"] = min(19, own + NICENESS)
        assert seen == expected


def test_a_set_made_ready_for_nothing_is_given_back(
    make_core: MakeCore, other_weights: Mapping[str, Tensor]
) -> None:
    core: EmbeddedCore = make_core()
    arrived = published(1, other_weights)
    unused = core.weights.fill(arrived, go_on)
    assert arrived.location.buffer._num_readers == 1
    unused.release()
    assert arrived.location.buffer._num_readers == 0
    assert core.version == WeightVersion("inc", 0)
