"""Objects at a URI: one small interface over a folder and over every store that obstore names (S3, GCS, Azure, ...).

The invariant everything else rests on is `create`: it stores an object whole or not at all, and never over another one.
Folders (`local_store`) get it from temp file, fsync, `link(2)` (which fails if the name is taken), unlink, fsync of the
folder; object stores (`remote_store`) from a conditional PUT. `probe` refuses stores that do not honour it.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from datetime import datetime
from typing import NamedTuple

from storage.errors import StoreError


class ObjectMissing(StoreError):
    """No object at this key."""


class EmptyObject(StoreError):
    """A range was asked of an object of zero bytes."""


class CannotList(StoreError):
    """This kind of store gives objects by their names only."""


class ObjectChanged(StoreError):
    """The object at this key is another one than when its tag was taken."""


class Tail(NamedTuple):
    """The end of an object. size: of all of it. tag: names this very object at its key, where the store has such a thing."""

    data: bytes
    size: int
    tag: str | None


class ObjectStore(ABC):
    """Keys are relative, with `/` between their parts. Safe to share between threads."""

    uri: str

    @abstractmethod
    def get(self, key: str) -> bytes:
        """The whole object. Raises ObjectMissing."""

    @abstractmethod
    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Up to `length` bytes from `start`; fewer only at the object's end. Raises ObjectMissing."""

    @abstractmethod
    def get_view(self, key: str, start: int, length: int, tag: str | None = None) -> memoryview:
        """`get_range` with as few copies as the store allows; valid until this thread's next call.

        tag: of `get_tail`; ObjectChanged is raised when the bytes come from another object than that one.
        """

    @abstractmethod
    def get_tail(self, key: str, length: int) -> Tail:
        """The last `length` bytes, or all there are. Raises ObjectMissing."""

    @abstractmethod
    def create(self, key: str, data: bytes | memoryview) -> bool:
        """Stores the object if the key is free, and says whether it was. Atomic and durable."""

    @abstractmethod
    def put(self, key: str, data: bytes | memoryview) -> None:
        """Stores the object over whatever is there. Atomic. Only for what can be rebuilt."""

    @abstractmethod
    def sizes(self, prefix: str = "") -> dict[str, int]:
        """{key: bytes} of all objects under the folder `prefix` ("" for all)."""

    @abstractmethod
    def written(self) -> dict[str, tuple[int, datetime]]:
        """{key: (bytes, when it was last written)} of all objects, and of what killed writers of a folder left behind."""

    @abstractmethod
    def folders(self, prefix: str = "") -> list[str]:
        """Names of the folders directly under `prefix`."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Removes the object; no error if there is none."""

    def exists(self, key: str) -> bool:
        try:
            self.get_range(key, 0, 1)
        except EmptyObject:
            return True
        except ObjectMissing:
            return False
        return True

    def probe(self) -> None:
        """Creates one key twice. Raises StoreError when the store cannot be written to or lets the second one through."""
        self.folders()  # some servers make a missing bucket at the first PUT; a list says that it is not there
        key = f"probe-{uuid.uuid4().hex}"
        self.create(key, b"1")  # whether it was stored is asked of the store: an answer may be lost
        second = self.create(key, b"2")
        kept = self.get(key)
        self.delete(key)
        if second or kept != b"1":
            raise StoreError(
                f"{self.uri}: the store let a second create-only PUT replace the first, so writers could overwrite each "
                "other; use a store that honours If-None-Match (AWS S3, MinIO, SeaweedFS, GCS, Azure do)"
            )
