"""Token ids and loss masks of sequences, by chunks of 1 Mi tokens that are fetched once and kept while there is room.

Random reads of a large dataset meet another chunk nearly every time, and a chunk (about 2 MB) may be larger than the states
of a short sequence. So chunks are fetched beside the states, both arrays at once, and never twice at the same time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

import numpy as np

from storage import layout
from storage.commit import PlanDocument, get_checked
from storage.fetch import twice
from storage.objects import ObjectStore
from storage.zarr_array import decode_chunk

_DTYPES = {"tokens": np.dtype("int32"), "loss_mask": np.dtype("bool")}
# Decoded chunks kept: 4 MiB of ids and 1 MiB of mask for each 1 Mi tokens, so those of 51 Mi tokens.
CACHE_BYTES = 256 << 20


class TokenReader:
    """Reads ranges of the token axis of one dataset. Safe to share between threads.

    Memory: `cache_bytes` of decoded chunks, and those that callers wait for.
    """

    def __init__(
        self, store: ObjectStore, document: PlanDocument, *, cache_bytes: int = CACHE_BYTES, threads: int = 4
    ) -> None:
        self.store, self._document, self._most = store, document, cache_bytes
        self._chunks: OrderedDict[tuple[str, int], Future[np.ndarray]] = OrderedDict()
        self._lock = Lock()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="statehouse-tokens")

    def ask(self, start: int, length: int) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
        """Starts fetching what is not here; call the result for token_ids [T] int32 and loss_mask [T] bool.

        The arrays are the caller's own: a view would keep a whole chunk alive. Raises, when called, ShardCorrupt, StoreError.
        """
        chunks = range(start // layout.TOKEN_CHUNK, (start + length - 1) // layout.TOKEN_CHUNK + 1)
        waiting = {array: [self._chunk(array, chunk) for chunk in chunks] for array in _DTYPES}

        def values(array: str) -> np.ndarray:
            out, low = np.empty(length, _DTYPES[array]), chunks[0] * layout.TOKEN_CHUNK
            for future in waiting[array]:
                first, last = max(start, low), min(start + length, low + layout.TOKEN_CHUNK)
                out[first - start : last - start] = future.result()[first - low : last - low]
                low += layout.TOKEN_CHUNK
            return out

        return lambda: (values("tokens"), values("loss_mask"))

    def _chunk(self, array: str, chunk: int) -> Future[np.ndarray]:
        key = (array, chunk)
        with self._lock:
            found = self._chunks.get(key)
            if found is not None and not (found.done() and found.exception()):
                self._chunks.move_to_end(key)
                return found
            future = self._chunks[key] = self._pool.submit(self._load, array, chunk)
            self._evict()
        future.add_done_callback(lambda done: self._forget(key, done) if done.exception() else None)
        return future

    def _evict(self) -> None:
        held = sum(_DTYPES[array].itemsize for array, _ in self._chunks) * layout.TOKEN_CHUNK
        for key in list(self._chunks):
            if held <= self._most:
                return
            if self._chunks[key].done():  # what somebody waits for stays, or it would be fetched again
                del self._chunks[key]
                held -= _DTYPES[key[0]].itemsize * layout.TOKEN_CHUNK

    def _forget(self, key: tuple[str, int], future: Future[np.ndarray]) -> None:
        """An error is no chunk: the next reader tries again."""
        with self._lock:
            if self._chunks.get(key) is future:
                del self._chunks[key]

    def _load(self, array: str, chunk: int) -> np.ndarray:
        data = twice(lambda: get_checked(self.store, layout.token_key(array, chunk), self._document))
        return decode_chunk(data, _DTYPES[array], [layout.TOKEN_CHUNK])
