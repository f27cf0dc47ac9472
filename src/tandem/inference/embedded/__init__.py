"""Generation with a Hugging Face model in this process or in a child of it."""

import gc

# What is imported with torch and transformers stays: searching it for garbage again and again takes
# a sixth of the time until the first token.
_was_enabled = gc.isenabled()
gc.disable()
try:
    from tandem.inference.embedded.backend import EmbeddedBackend
    from tandem.inference.embedded.process import ChildBackend
finally:
    if _was_enabled:
        gc.enable()

__all__ = ["ChildBackend", "EmbeddedBackend"]
