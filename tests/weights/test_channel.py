import threading

import pytest
import torch

from tandem.errors import ConfigError, WeightSyncError
from tandem.types import ParamSpec, WeightUpdateMeta
from tandem.weights import cancel, expect, open_published, publish, release

SPECS = [ParamSpec("a.weight", (2, 3), "float32"), ParamSpec("a.bias", (3,), "float32")]


def tensors(value: float = 1.0):
    return [("a.weight", torch.full((2, 3), value)), ("a.bias", torch.full((3,), value))]


def meta(version: int = 1, **kwargs) -> WeightUpdateMeta:
    return WeightUpdateMeta(type="inprocess", version=version, **kwargs)


@pytest.fixture(autouse=True)
def _release_channels():
    yield
    for channel in ("policy", "critic"):
        release(channel)


def read(future):
    with open_published(future.result(timeout=5)) as got:
        return {name: tensor.clone() for name, tensor in got.items()}


def test_receiver_first():
    future = expect(meta())
    assert not future.done()
    manifest = publish(meta(), SPECS, tensors())
    assert future.result(timeout=0).manifest == manifest
    assert torch.equal(read(future)["a.bias"], torch.ones(3))


def test_sender_first():
    publish(meta(), SPECS, tensors(2.0))
    assert torch.equal(read(expect(meta()))["a.bias"], torch.full((3,), 2.0))


def test_publication_is_handed_over_once():
    publish(meta(), SPECS, tensors())
    assert expect(meta()).done()
    assert not expect(meta()).done()


@pytest.mark.parametrize(
    "other", [{"version": 2}, {"incarnation": "b"}, {"channel": "critic"}], ids=str
)
def test_other_version_incarnation_or_channel_does_not_meet(other):
    future = expect(meta())
    publish(meta(**{"version": 1, **other}), SPECS, tensors())
    assert not future.done()


def test_second_receiver_of_a_pending_version_is_an_error():
    first = expect(meta())
    with pytest.raises(WeightSyncError, match=r"1 is expected already on channel 'policy'"):
        expect(meta())
    publish(meta(), SPECS, tensors())
    assert first.done()


@pytest.mark.parametrize("give_up", [lambda m, f: cancel(m), lambda m, f: f.cancel()])
def test_after_giving_up_the_version_can_be_expected_again(give_up):
    first = expect(meta())
    with pytest.raises(TimeoutError):
        first.result(timeout=0.01)
    give_up(meta(), first)
    assert first.cancelled()
    second = expect(meta())
    publish(meta(), SPECS, tensors())
    assert second.done()


def test_cancel_forgets_what_was_published_and_knows_no_errors():
    cancel(meta())
    publish(meta(), SPECS, tensors())
    cancel(meta())
    assert not expect(meta()).done()


def failing_stream():
    yield tensors()[0]
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("receiver_first", [True, False])
def test_failed_stream_fails_both_ends_and_a_retry_succeeds(receiver_first):
    future = expect(meta()) if receiver_first else None
    with pytest.raises(WeightSyncError, match=r"version 1: .*RuntimeError: out of memory"):
        publish(meta(), SPECS, failing_stream())
    future = future or expect(meta())
    with pytest.raises(WeightSyncError, match="out of memory"):
        future.result(timeout=0)
    retried = expect(meta())
    publish(meta(), SPECS, tensors(3.0))
    assert torch.equal(read(retried)["a.weight"], torch.full((2, 3), 3.0))


def test_interrupt_reaches_the_sender_as_itself_and_the_receiver_as_an_error():
    def interrupted():
        yield tensors()[0]
        raise KeyboardInterrupt

    future = expect(meta())
    with pytest.raises(KeyboardInterrupt):
        publish(meta(), SPECS, interrupted())
    assert isinstance(future.exception(timeout=0), WeightSyncError)


W, B = tensors()


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        ([W], "ended before a.bias"),
        ([W, B, ("c", torch.ones(1))], "got c after the last"),
        ([B, W], "got \\('a.bias'"),
        ([("a.weight", torch.ones(3, 2)), B], "\\(3, 2\\)"),
        ([("a.weight", torch.ones(2, 3).double()), B], "float64"),
        ([("a.weightX", W[1]), B], "a.weightX"),
        ([W, W], "announced"),
    ],
    ids=["short", "long", "order", "shape", "dtype", "name", "duplicate"],
)
def test_stream_that_is_not_what_was_announced_is_refused(stream, words):
    future = expect(meta())
    with pytest.raises(WeightSyncError, match=words):
        publish(meta(), SPECS, stream)
    assert isinstance(future.exception(timeout=0), WeightSyncError)


def test_repeated_name_in_the_specs_is_refused():
    with pytest.raises(WeightSyncError, match=r"repeated names a\.bias"):
        publish(meta(), [*SPECS, SPECS[1]], tensors())


@pytest.mark.parametrize("dtype", ["float33", "int32"])
def test_impossible_travel_dtype_is_refused(dtype):
    future = expect(meta(dtype=dtype))
    with pytest.raises(ConfigError, match=f"dtype: got '{dtype}'"):
        publish(meta(dtype=dtype), SPECS, tensors())
    assert isinstance(future.exception(timeout=0), WeightSyncError)


def test_unknown_transport_is_refused_with_the_known_ones():
    unknown = WeightUpdateMeta(type="pigeon", version=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="inprocess, shared_memory, disk"):
        publish(unknown, SPECS, tensors())


def test_release_fails_who_still_waits():
    future = expect(meta())
    release("policy")
    with pytest.raises(WeightSyncError, match="released"):
        future.result(timeout=0)


def test_ends_in_different_threads_meet_in_any_order():
    got = {}

    def receive(version):
        got[version] = read(expect(meta(version)))["a.bias"][0].item()

    for version in range(50):
        receiver = threading.Thread(target=receive, args=(version,))
        sender = threading.Thread(
            target=publish, args=(meta(version), SPECS, tensors(float(version)))
        )
        for thread in (receiver, sender) if version % 2 else (sender, receiver):
            thread.start()
        for thread in (receiver, sender):
            thread.join(timeout=10)
        assert got[version] == version
