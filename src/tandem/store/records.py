"""What is kept of one attempt at an episode. No tensors, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.types import EpisodeState


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """One attempt, when its run ended: ``ready``, ``rejected``, ``failed`` or ``superseded``.

    ``rewards`` has None where a sample was not scored. ``versions``: the oldest and newest version
    of each row's generated tokens, None for a row without any. Times are in seconds; an attempt
    that never started ran for 0.
    """

    episode_id: int
    attempt: int
    training: bool
    state: EpisodeState
    reason: str | None
    prompt: str | None
    completions: tuple[str, ...]
    rewards: tuple[float | None, ...]
    versions: tuple[tuple[int, int] | None, ...]
    queued_s: float
    running_s: float
