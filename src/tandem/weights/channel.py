"""Where the two ends of an update meet: in the controlling process, by channel and version.

``expect`` (receiver) and ``publish`` (sender) may come in either order. What travels how belongs to
``transports/``; when to update belongs to the trainers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol

from torch import Tensor

from tandem.errors import ConfigError, TandemError, WeightSyncError
from tandem.types import ParamSpec, WeightUpdateMeta
from tandem.weights.manifest import Manifest, Published
from tandem.weights.transports.disk import DiskSender
from tandem.weights.transports.inprocess import InprocessSender
from tandem.weights.transports.shared_memory import SharedMemorySender


class Sender(Protocol):
    """The writing end of one transport; used by one thread at a time."""

    def write(
        self,
        meta: WeightUpdateMeta,
        specs: Sequence[ParamSpec],
        tensors: Iterable[tuple[str, Tensor]],
    ) -> Published: ...

    def release(self) -> None: ...


SENDERS: dict[str, Callable[[str], Sender]] = {
    "inprocess": lambda channel: InprocessSender(),
    "shared_memory": SharedMemorySender,
    "disk": lambda channel: DiskSender(),
}

_Key = tuple[str, int]


class _Channel:
    """One meeting point: its senders, who waits, and what nobody has asked for yet."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sending = threading.Lock()
        self.senders: dict[str, Sender] = {}
        self.waiting: dict[_Key, Future[Published]] = {}
        self.unclaimed: tuple[_Key, Published | WeightSyncError] | None = None
        self.last: Manifest | None = None

    def sender(self, kind: str) -> Sender:
        if kind not in SENDERS:
            raise ConfigError(f"WeightUpdateMeta.type: got {kind!r}, allowed: {', '.join(SENDERS)}")
        if kind not in self.senders:
            self.senders[kind] = SENDERS[kind](self.name)
        return self.senders[kind]


_CHANNELS: dict[str, _Channel] = {}
_LOCK = threading.Lock()


def expect(meta: WeightUpdateMeta) -> Future[Published]:
    """Register as the receiver of one version; the future ends when the sender is done.

    It holds ``WeightSyncError`` if the stream failed. Who stops waiting calls ``cancel(meta)``.

    Raises:
        WeightSyncError: the version is expected already.
    """
    key = _key(meta)
    future: Future[Published] = Future()
    with _LOCK:
        channel = _CHANNELS.setdefault(meta.channel, _Channel(meta.channel))
        if key in channel.waiting and not channel.waiting[key].cancelled():
            raise WeightSyncError(
                f"version: {meta.version} is expected already on channel {meta.channel!r}; one "
                "receiver a channel, and cancel(meta) before asking again"
            )
        early = channel.unclaimed
        if early is None or early[0] != key:
            channel.waiting[key] = future
            return future
        channel.unclaimed = None
    _resolve(future, early[1])
    return future


def publish(
    meta: WeightUpdateMeta, specs: Sequence[ParamSpec], tensors: Iterable[tuple[str, Tensor]]
) -> Manifest:
    """Write one version through ``meta.type`` and hand it to its receiver; blocks until written.

    ``specs`` announce the stream in its order, in the dtypes of the stream; floating-point tensors
    are cast to ``meta.dtype``. A version that nobody expects yet is kept until the next one.

    Raises:
        WeightSyncError: the stream or the transport failed; the receiver's future holds it too.
        ConfigError: ``meta`` asks for what no transport can do; the future holds WeightSyncError.
    """
    key = _key(meta)
    with _LOCK:
        channel = _CHANNELS.setdefault(meta.channel, _Channel(meta.channel))
    with channel.sending:
        try:
            published = channel.sender(meta.type).write(meta, specs, tensors)
        except BaseException as error:
            failure = _as_sync_error(meta, error)
            _hand_over(channel, key, failure)
            if isinstance(error, TandemError) or not isinstance(error, Exception):
                raise
            raise failure from error
        channel.last = published.manifest
        _hand_over(channel, key, published)
    return published.manifest


def last_published(channel: str) -> Manifest | None:
    """What was sent last through a channel; None before the first time and after ``release``."""
    with _LOCK:
        found = _CHANNELS.get(channel)
    return None if found is None else found.last


def cancel(meta: WeightUpdateMeta) -> None:
    """Stop expecting a version, or forget it if it was published and not asked for. Idempotent."""
    key = _key(meta)
    with _LOCK:
        channel = _CHANNELS.get(meta.channel)
        if channel is None:
            return
        future = channel.waiting.pop(key, None)
        if channel.unclaimed is not None and channel.unclaimed[0] == key:
            channel.unclaimed = None
    if future is not None:
        future.cancel()


def release(channel: str) -> None:
    """Free the buffers and files of a channel; what is still expected fails. Idempotent."""
    with _LOCK:
        closed = _CHANNELS.pop(channel, None)
        waiting = list(closed.waiting.values()) if closed is not None else []
    if closed is None:
        return
    for future in waiting:
        _resolve(future, WeightSyncError(f"channel {channel!r} was released while waiting"))
    with closed.sending:
        for sender in closed.senders.values():
            sender.release()


def _key(meta: WeightUpdateMeta) -> _Key:
    return meta.incarnation, meta.version


def _hand_over(channel: _Channel, key: _Key, outcome: Published | WeightSyncError) -> None:
    with _LOCK:
        future = channel.waiting.pop(key, None)
        if future is None:
            channel.unclaimed = (key, outcome)
    if future is not None:
        _resolve(future, outcome)


def _resolve(future: Future[Published], outcome: Published | WeightSyncError) -> None:
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, WeightSyncError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _as_sync_error(meta: WeightUpdateMeta, error: BaseException) -> WeightSyncError:
    if isinstance(error, WeightSyncError):
        return error
    failure = WeightSyncError(
        f"weight version {meta.version}: the sender failed with {type(error).__name__}: {error}; "
        "the old version serves on, publish the version again"
    )
    failure.__cause__ = error
    return failure
