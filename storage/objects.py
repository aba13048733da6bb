"""Objects at a URI (`object_store` says what a store is): the one place that knows which kind of store a URI names."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

from storage.errors import StoreError
from storage.local_store import LocalStore
from storage.object_store import ObjectMissing, ObjectStore
from storage.remote_store import RemoteStore

__all__ = ["LocalStore", "ObjectMissing", "ObjectStore", "RemoteStore", "open_store"]


def open_store(uri: str | Path) -> ObjectStore:
    """The store at a folder, `file://` or object-store URI. Opens nothing: errors come with the first request."""
    text = str(uri)
    if "\0" in text or re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)", text):
        raise StoreError(f"{text!r}: no URI; expected a folder or scheme://bucket/path such as s3://bucket/datasets/x")
    if "://" not in text:
        return LocalStore(text)
    scheme, rest = text.split("://", 1)
    if scheme.lower() != "file":
        return RemoteStore(f"{scheme.lower()}://{rest}")
    if not rest.startswith("/"):
        raise StoreError(
            f"{text}: a file URI has three slashes, as in file:///data/x; a relative folder is given without"
        )
    return LocalStore(unquote(rest))
