"""What is kept of an episode when it has ended. Where it is kept is the listener's choice.

States and staleness belong to ``rollout/``.
"""

from tandem.store.records import EpisodeRecord

__all__ = ["EpisodeRecord"]
