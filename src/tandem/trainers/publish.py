"""The one way new weights reach an inference engine."""

from __future__ import annotations

from tandem.config import InferenceConfig
from tandem.rollout import InferenceEngine
from tandem.train import TrainEngine
from tandem.types import TransportKind, WeightUpdateMeta


def publish_weights(
    train: TrainEngine,
    inference: InferenceEngine,
    *,
    version: int,
    incarnation: str,
    config: InferenceConfig,
    disk_path: str | None = None,
) -> None:
    """Send the weights of ``train`` to ``inference`` as ``version`` and wait for the commit.

    Afterwards both engines have that version and the training batch in hand is consumed.

    Raises:
        WeightSyncError: the update was refused; the old version serves on.
    """
    meta = WeightUpdateMeta(
        type=transport_of(config),
        version=version,
        incarnation=incarnation,
        channel=f"policy-{incarnation}",
        path=disk_path,
        dtype=config.dtype,
    )
    future = inference.update_weights(meta)
    train.upload_weights(meta)
    future.result(timeout=config.update_timeout_s)
    train.set_version(version)
    inference.set_version(version)


def transport_of(config: InferenceConfig) -> TransportKind:
    if config.transport == "auto":
        return "shared_memory" if config.mode == "process" else "inprocess"
    return config.transport
