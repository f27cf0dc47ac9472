"""Ways for the bytes of a version to travel. A sender writes and releases; readers stand beside it.

Meeting (who waits for which version) belongs to ``weights/channel.py``.
"""
