"""The trajectory store: what happened in every episode, for logs and people.

Rows that can be trained on and their states belong to the executor.
"""

from tandem.store.memory import MemoryEpisodeStore
from tandem.store.records import EpisodeRecord

__all__ = ["EpisodeRecord", "MemoryEpisodeStore"]
