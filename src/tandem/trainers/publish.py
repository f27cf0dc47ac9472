"""The one way new weights reach an inference engine."""

from __future__ import annotations

import logging

from tandem.config import InferenceConfig
from tandem.errors import WeightSyncError
from tandem.observe.moments import reach
from tandem.rollout import InferenceEngine
from tandem.train import TrainEngine
from tandem.types import TransportKind, WeightUpdateMeta
from tandem.weights import Manifest, last_published, release

log = logging.getLogger(__name__)

ATTEMPTS = 3
SLACK_S = 10.0
"""How long the backend's own deadline, which says what was waited for, may come late."""


def publish_weights(
    train: TrainEngine,
    inference: InferenceEngine,
    *,
    version: int,
    incarnation: str,
    config: InferenceConfig,
    disk_path: str | None = None,
) -> Manifest:
    """Send the weights of ``train`` to ``inference`` as ``version`` and wait for the commit.

    Afterwards both engines have that version and the training batch in hand is consumed. Returns
    what was sent.

    An update that fails is tried again, ``ATTEMPTS`` times in all.

    Raises:
        WeightSyncError: the update was refused; the old version serves on.
        EngineError: the backend ended.
    """
    meta = WeightUpdateMeta(
        type=transport_of(config),
        version=version,
        incarnation=incarnation,
        channel=_channel(incarnation),
        path=disk_path,
        dtype=config.dtype,
    )
    for attempt in range(1, ATTEMPTS + 1):
        try:
            future = inference.update_weights(meta)
            reach("publish.begun")
            train.upload_weights(meta)
            reach("publish.sent")
            future.result(timeout=config.update_timeout_s + SLACK_S)
            break
        except WeightSyncError as error:
            if attempt == ATTEMPTS:
                raise
            log.warning("publishing version %d again: %s", version, error)
    train.set_version(version)
    inference.set_version(version)
    manifest = last_published(meta.channel)
    assert manifest is not None
    return manifest


def release_weights(incarnation: str) -> None:
    """Free what ``publish_weights`` holds for a start of a run; call it when that start ends."""
    release(_channel(incarnation))


def _channel(incarnation: str) -> str:
    return f"policy-{incarnation}"


def transport_of(config: InferenceConfig) -> TransportKind:
    if config.transport == "auto":
        return "shared_memory" if config.mode == "process" else "inprocess"
    return config.transport
