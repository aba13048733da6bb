"""Rows of shards by parallel range GETs, each decoded by the thread that fetched it, straight into the caller's memory.

Measured at H = 7168 against raw GETs of the same bytes: what costs is copying (one copy less is .1 s/GB), fresh pages
(.3 to .45 s/GB), and waiting for one GET at a time. So indexes are cached, a range is cut into parts of at most 16 MiB,
and nothing is copied between the socket's buffer and zstd.

What is in flight at once: `threads` parts (at most `threads` x 16 MiB) and two planes of a chunk for each thread.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import TypeVar

import numpy as np

from storage import layout
from storage.decode import Part, decode_part, decode_planes, parts_of
from storage.errors import ShardCorrupt
from storage.object_store import EmptyObject, ObjectChanged
from storage.objects import ObjectMissing, ObjectStore
from storage.shard import Footer, ShardIdentity, corrupt, read_footer

Result = TypeVar("Result")
# A shard, its footer, a part of it, and what decodes the part's bytes.
Job = tuple[int, Footer, Part, Callable[[memoryview, Part], None]]
# Indexes kept: 8 KB each at H = 7168, 16 bytes a chunk.
_INDEX_CACHE_BYTES = 256 * 1024 * 1024
# What a receipt takes as Python objects, beside the index.
_RECEIPT_BYTES = 8192
# Damage in transit is not damage in the store: a part that fails its checks is fetched once more.
_TRIES = 2
# A repair replaces a shard once; web servers behind one name may each give a tag of their own.
_REPLACED = 5


@dataclass
class Spent:
    """fetched_bytes: as stored. fetch_s, decode_s: summed over the threads that fetch and decode."""

    fetched_bytes: int = 0
    fetch_s: float = 0.0
    decode_s: float = 0.0


class ShardReader:
    """Reads rows of the shards of one dataset. Safe to share between threads.

    check(shard, footer) raises ShardCorrupt when a footer is not the one that was sealed.
    """

    def __init__(
        self,
        store: ObjectStore,
        identity: ShardIdentity,
        offset_LH: np.ndarray | None,
        offset_hash: str | None,
        check: Callable[[int, Footer], None],
        threads: int,
    ) -> None:
        self.store, self.identity, self.threads = store, identity, threads
        self._offset_LH, self._offset_hash, self._check = offset_LH, offset_hash, check
        self._footers: OrderedDict[int, Footer] = OrderedDict()
        self._most_footers = max(64, _INDEX_CACHE_BYTES // (identity.index_bytes + _RECEIPT_BYTES))
        self.spent = Spent()
        self._lock = Lock()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="statehouse-get")

    def footer(self, shard: int) -> Footer:
        """Receipt and index of a shard: one request the first time. Raises ShardCorrupt."""
        with self._lock:
            if (footer := self._footers.get(shard)) is not None:
                self._footers.move_to_end(shard)
                return footer
        key = layout.shard_key(shard)

        def load() -> Footer:
            return read_footer(self.store, key, self.identity, shard, offset=self._offset_hash)

        try:
            footer = twice(load)
        except ObjectMissing:
            raise ShardCorrupt(
                f"{self.store.uri}/{key}: shard {shard} is missing; restore it with `statehouse repair {self.store.uri} "
                "--from COPY_URI`, or extract it again with `python -m ray_jobs.extract RECIPE --repair`"
            ) from None
        self._check(shard, footer)
        with self._lock:
            self._footers[shard] = footer
            while len(self._footers) > self._most_footers:
                self._footers.popitem(last=False)
        return footer

    def read(self, start: int, out_TLH: np.ndarray) -> None:
        """Rows `start` to `start + T - 1` of the token axis into uint16 `out_TLH` [T, L, H], contiguous.

        Raises ShardCorrupt, StoreError; then nothing can be said of what `out_TLH` holds.
        """
        jobs: list[Job] = []
        for shard, first_row, low, high in self._segments(start, len(out_TLH)):
            footer = self.footer(shard)
            decode = partial(
                decode_part,
                footer=footer,
                identity=self.identity,
                offset_LH=self._offset_LH,
                first_row=first_row,
                out_TLH=out_TLH[low:high],
                where=self._where(shard),
            )
            jobs += [(shard, footer, part, decode) for part in self._parts(footer, first_row, high - low)]
        self._run(jobs)

    def read_planes(self, start: int, out_2TLH: np.ndarray) -> None:
        """Like `read`, but the planes stay apart: uint8 `out_2TLH` [2, T, L, H]."""
        jobs: list[Job] = []
        for shard, first_row, low, high in self._segments(start, out_2TLH.shape[1]):
            footer = self.footer(shard)
            decode = partial(
                decode_planes,
                footer=footer,
                identity=self.identity,
                first_row=first_row,
                out=out_2TLH[:, low:high],
                where=self._where(shard),
            )
            jobs += [(shard, footer, part, decode) for part in self._parts(footer, first_row, high - low)]
        self._run(jobs)

    def _where(self, shard: int) -> str:
        return f"{self.store.uri}/{layout.shard_key(shard)}"

    def _segments(self, start: int, rows: int) -> list[tuple[int, int, int, int]]:
        """(shard, its first row wanted, first and last + 1 of the rows wanted): several where a sequence is longer."""
        size = self.identity.geometry.shard_tokens
        found, low = [], 0
        while low < rows:
            shard, first_row = divmod(start + low, size)
            high = min(rows, low + size - first_row)
            found.append((shard, first_row, low, high))
            low = high
        return found

    def _parts(self, footer: Footer, first_row: int, rows: int) -> list[Part]:
        chunk = self.identity.geometry.chunk_tokens
        return parts_of(footer, first_row // chunk, (first_row + rows - 1) // chunk)

    def _run(self, jobs: list[Job]) -> None:
        if len(jobs) == 1:  # a short sequence: no other thread is quicker
            self._fetch(*jobs[0])
            return
        futures: list[Future[None]] = [self._pool.submit(self._fetch, *job) for job in jobs]
        # All of them, even when one fails: nobody may write to the caller's memory afterwards.
        wait(futures)
        for future in futures:
            future.result()

    def _fetch(self, shard: int, footer: Footer, part: Part, decode: Callable[[memoryview, Part], None]) -> None:
        key = layout.shard_key(shard)

        def once() -> None:
            began = time.perf_counter()
            try:
                data = self._get(shard, footer, key, part)
            except EmptyObject:  # it ends before the range begins
                data = memoryview(b"")
            if len(data) != part.length:
                raise corrupt(self._where(shard), f"{len(data)} bytes from {part.start}, expected {part.length}")
            fetched = time.perf_counter()
            decode(data, part)
            with self._lock:
                self.spent.fetched_bytes += part.length
                self.spent.fetch_s += fetched - began
                self.spent.decode_s += time.perf_counter() - fetched

        twice(once)

    def _get(self, shard: int, footer: Footer, key: str, part: Part) -> memoryview:
        """A part of the very object that `footer` was read from, or of one that replaced it and holds the same.

        A repair may replace a shard while it is read. Chunks of equal sizes lie at equal places in both objects and are
        whole in both, so nothing but the object's tag tells them apart. Raises ShardCorrupt when the new one holds others.
        """
        tag = footer.tag
        for _ in range(_REPLACED):
            try:
                return self.store.get_view(key, part.start, part.length, tag)
            except ObjectChanged:
                with self._lock:
                    if (cached := self._footers.get(shard)) is not None and cached.tag == tag:
                        del self._footers[shard]
                tag = self.footer(shard).tag
        raise corrupt(self._where(shard), "replaced again and again while it was read; read it again")


def twice(action: Callable[[], Result]) -> Result:
    """Does it again when it ends in ShardCorrupt: what was damaged on its way is whole the second time."""
    for left in reversed(range(_TRIES)):
        try:
            return action()
        except ShardCorrupt:
            if not left:
                raise
            time.sleep(0.05)
    raise AssertionError
