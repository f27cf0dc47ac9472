"""Named moments of a run at which a test may end the process: the seam of the kill tests.

A moment is an audit event of Python (``sys.audit``, event ``tandem.moment``, argument: its name).
Without a hook it costs nothing and does nothing. ``benchmarks/kill_matrix.py`` adds a hook that
kills the process, to show that whatever was interrupted is neither lost nor done twice.
"""

from __future__ import annotations

import sys

MOMENTS = {
    "store.commit": "changes are in the transaction, which is not committed",
    "store.rewind": "the store is half-way back to a checkpoint",
    "store.retention": "old attempts are removed, not committed",
    "rollout.handed_over": "a batch is the trainer's, nothing was trained",
    "rollout.consuming": "the new version serves, its batch is not marked as consumed",
    "rollout.consumed": "the mark is on its way to the store",
    "publish.begun": "the generator expects new weights, none were sent",
    "publish.sent": "all weights were sent, the version is not committed",
    "checkpoint.before_rename": "the checkpoint is complete, but does not have its name",
    "checkpoint.after_rename": "the checkpoint counts, old ones are still there",
    "checkpoint.retention": "an old checkpoint is hidden, not yet removed",
}
"""What is true at each; after it the run goes on."""


def reach(moment: str) -> None:
    """Say that a moment has come."""
    assert moment in MOMENTS, moment
    sys.audit("tandem.moment", moment)
