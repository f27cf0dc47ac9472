"""URLs of object stores, as far as they can be judged by their text alone."""

from __future__ import annotations


def protocols(url: str) -> list[str]:
    """Protocols of an fsspec URL, which may be a chain (``simplecache::s3://…``)."""
    parts = url.split("::")
    plain = "file" if len(parts) == 1 else None
    return [part.split("://", 1)[0] if "://" in part else plain or part for part in parts]


def check_scheme(url: str) -> None:
    """Raise ValueError if fsspec has never heard of a protocol of ``url``."""
    import fsspec

    known = {*fsspec.available_protocols(), *fsspec.registry}
    for protocol in protocols(url):
        if protocol not in known:
            raise ValueError(
                f"{protocol}:// is no store that fsspec knows, allowed: a path, or a URL such as "
                "s3://BUCKET/FOLDER, gs://… or az://…"
            )
