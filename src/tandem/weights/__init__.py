"""Versioned weight movement between a train engine and an inference engine, both ends side by side.

When to publish, and what a served version means for rollout, belong to the trainers and rollout.
"""

from tandem.weights.channel import cancel, expect, last_published, publish, release
from tandem.weights.manifest import (
    FileLocation,
    Location,
    Manifest,
    MemoryLocation,
    Published,
    TensorEntry,
    check_manifest,
)
from tandem.weights.receive import load_into, open_published

__all__ = [
    "FileLocation",
    "Location",
    "Manifest",
    "MemoryLocation",
    "Published",
    "TensorEntry",
    "cancel",
    "check_manifest",
    "expect",
    "last_published",
    "load_into",
    "open_published",
    "publish",
    "release",
]
