"""Objects at a URI (`object_store` says what a store is): the one place that knows which kind of store a URI names."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

from storage.errors import StoreError
from storage.fsspec_store import FsspecStore
from storage.local_store import LocalStore
from storage.object_store import ObjectMissing, ObjectStore
from storage.remote_store import RemoteStore

# What obstore opens; everything else is fsspec's. (Its memory:// would be another one for every store.)
_OBSTORE = {"s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "http", "https"}
__all__ = ["FsspecStore", "LocalStore", "ObjectMissing", "ObjectStore", "RemoteStore", "open_store"]


def open_store(uri: str | Path) -> ObjectStore:
    """The store at a folder, `file://`, object-store URI, or any other that fsspec opens (those cannot be written to).

    Folders and object stores are not opened: errors come with the first request.
    """
    text = str(uri)
    if "\0" in text or re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)", text):
        raise StoreError(f"{text!r}: no URI; expected a folder or scheme://bucket/path such as s3://bucket/datasets/x")
    if "://" not in text:
        return LocalStore(text)
    scheme, rest = text.split("://", 1)
    scheme = scheme.lower()
    if scheme != "file":
        return RemoteStore(f"{scheme}://{rest}") if scheme in _OBSTORE else FsspecStore(f"{scheme}://{rest}")
    if not rest.startswith("/"):
        raise StoreError(
            f"{text}: a file URI has three slashes, as in file:///data/x; a relative folder is given without"
        )
    return LocalStore(unquote(rest))
