"""Generation with a Hugging Face model in this process or in a child of it."""

from tandem.inference.embedded.backend import EmbeddedBackend
from tandem.inference.embedded.process import ChildBackend

__all__ = ["ChildBackend", "EmbeddedBackend"]
