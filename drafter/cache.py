"""What was fetched from a store, kept in a folder of a local disk for later epochs.

    <folder>/<dataset's fingerprint>/<key>.<start>.<length>     the bytes of one range, then their crc32c

The same sequences ask for the same ranges in every epoch, so a range is what is kept. Nothing here need be trusted: a
file that is torn, damaged or gone is a miss, and is fetched again. Workers of a node share the folder; files appear by
rename.

When it is full, what is in it stays, and the rest is fetched. Rows come in another random order each epoch: for a cache
that holds a share c of a dataset, keeping a fixed share hits c of the reads, while throwing out the least recently used
would hit about c^2 / 2. Only what belongs to other datasets makes room.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from threading import Lock

from drafter.recipe import LoaderSection
from storage.errors import StoreError
from storage.object_store import ObjectStore, Tail
from storage.objects import LocalStore, open_store
from storage.reader import Dataset
from storage.zarr_array import crc32c

log = logging.getLogger("statehouse")

_CRC = 4
_TEMPORARY = ".tmp-"
# The folder is measured again whenever this worker has added so much of its limit: other workers write, too.
_MEASURE_SHARE = 1 / 64
# Seconds without a write after the disk refused one.
_PAUSE_S = 60.0


@dataclass
class CacheCounts:
    """hits, misses: ranges. damaged: files that did not fit their checksum. refused: not kept, for want of room."""

    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    damaged: int = 0
    refused: int = 0


class CachedStore(ObjectStore):
    """A store whose ranges, read by `get_view`, are kept on a local disk; all else goes to the store itself.

    folder: on a local disk; made if need be. limit: bytes of it, over all datasets. Nothing is kept before `name` is
    set, to the dataset's fingerprint: a dataset that was made anew at the same URI never sees the ranges of the old one.
    """

    def __init__(self, store: ObjectStore, folder: str | Path, limit: int) -> None:
        self.store, self.uri, self.folder, self.limit = store, store.uri, Path(folder).expanduser().absolute(), limit
        self.name: str | None = None
        self.counts = CacheCounts()
        self._files = LocalStore(self.folder)
        self._lock = Lock()
        self._bytes, self._added = 0, limit  # measured before the first write
        self._paused_until = 0.0

    def get_view(self, key: str, start: int, length: int, tag: str | None = None) -> memoryview:
        """What is kept came from an object that matched the fingerprint, so its tag is of no account any more."""
        if self.name is None or not length:
            return self.store.get_view(key, start, length, tag)
        name = f"{self.name}/{key.replace('/', '-')}.{start}.{length}"
        if (found := self._kept(name, length)) is not None:
            return found
        view = self.store.get_view(key, start, length, tag)
        with self._lock:
            self.counts.misses += 1
        if len(view) == length:
            self._keep(name, view)
        return view

    def _kept(self, name: str, length: int) -> memoryview | None:
        try:
            view = self._files.get_view(name, 0, length + _CRC)
        except StoreError:  # not there, or a disk that fails: the store has it
            return None
        whole = len(view) == length + _CRC and view[length:] == _checksum(view[:length])
        with self._lock:
            if whole:
                self.counts.hits += 1
                self.counts.hit_bytes += length
            else:
                self.counts.damaged += 1
        if not whole:
            log.warning("cache file damaged, fetched again file=%s", self.folder / name)
            with contextlib.suppress(OSError):
                (self.folder / name).unlink()
            return None
        return view[:length]

    def _keep(self, name: str, view: memoryview) -> None:
        """Writes a range if there is room; a disk that refuses is waited for, and never an error."""
        if time.monotonic() < self._paused_until or not self._room(len(view) + _CRC):
            with self._lock:
                self.counts.refused += 1
            return
        path = self.folder / name
        temporary = path.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "wb", buffering=0) as file:
                for part in (view, memoryview(_checksum(view))):
                    while len(part):
                        part = part[file.write(part) :]
            os.replace(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            with self._lock:
                self.counts.refused += 1
                first, self._paused_until = not self._paused_until, time.monotonic() + _PAUSE_S
            if first:
                log.warning("cache cannot be written, going on without folder=%s: %s", self.folder, error.strerror)

    def _room(self, size: int) -> bool:
        """Whether `size` more bytes fit; counts them as added."""
        with self._lock:
            if self._added + size > self.limit * _MEASURE_SHARE or self._bytes + size > self.limit:
                self._bytes, self._added = self._make_room(size), 0
            if self._bytes + size > self.limit:
                return False
            self._bytes += size
            self._added += size
            return True

    def _make_room(self, size: int) -> int:
        """Measures the folder; deletes files of other datasets, the oldest first, until `size` fits. Returns its bytes."""
        files = []
        for folder, _, names in os.walk(self.folder):
            for name in names:
                path = Path(folder, name)
                with contextlib.suppress(OSError):
                    about = path.stat()
                    left_over = name.startswith(_TEMPORARY) and about.st_mtime < time.time() - 3600
                    files.append((about.st_mtime, about.st_size, path, left_over or path.parent.name != self.name))
        total = sum(one[1] for one in files)
        for _, own, path, foreign in sorted(files, key=lambda one: one[0]):
            if total + size <= self.limit:
                break
            if foreign:
                with contextlib.suppress(OSError):
                    path.unlink()
                total -= own
        return total

    # ---- all else: the store's own ----

    def get(self, key: str) -> bytes:
        return self.store.get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self.store.get_range(key, start, length)

    def get_tail(self, key: str, length: int) -> Tail:
        return self.store.get_tail(key, length)

    def create(self, key: str, data: bytes | memoryview) -> bool:
        return self.store.create(key, data)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.store.put(key, data)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        return self.store.sizes(prefix)

    def written(self) -> dict[str, tuple[int, datetime]]:
        return self.store.written()

    def folders(self, prefix: str = "") -> list[str]:
        return self.store.folders(prefix)

    def delete(self, key: str) -> None:
        self.store.delete(key)


def _checksum(view: memoryview) -> bytes:
    return crc32c(view).to_bytes(_CRC, "little")


def cached_opener(section: LoaderSection) -> Callable[[str], Dataset]:
    """Opens datasets so that what is read of them is kept as `section` says; those in a folder are on a disk already."""

    def open_one(uri: str) -> Dataset:
        store = open_store(uri)
        if section.cache is None or isinstance(store, LocalStore):
            return Dataset(store)
        cached = CachedStore(store, section.cache, section.cache_bytes)
        dataset = Dataset(cached)
        cached.name = dataset.fingerprint
        return dataset

    return open_one
