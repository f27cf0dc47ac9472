"""Checkpoints that are either complete or not there: atomic, digest-checked, without pickle.

What goes into a checkpoint belongs to the train engines and the trainers.
"""

from tandem.checkpoint.background import BackgroundWriter
from tandem.checkpoint.directory import latest, list_steps, supersede_newer
from tandem.checkpoint.manifest import CheckpointDir, verify
from tandem.checkpoint.remote import check_store, download, upload
from tandem.checkpoint.rng import capture_rng, restore_rng
from tandem.checkpoint.save import Staging, staging
from tandem.checkpoint.state import read_state, write_state
from tandem.checkpoint.tensors import read_tensors, write_tensors

__all__ = [
    "BackgroundWriter",
    "CheckpointDir",
    "Staging",
    "capture_rng",
    "check_store",
    "download",
    "latest",
    "list_steps",
    "read_state",
    "read_tensors",
    "restore_rng",
    "staging",
    "supersede_newer",
    "upload",
    "verify",
    "write_state",
    "write_tensors",
]
