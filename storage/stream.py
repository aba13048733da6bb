"""Reading ahead: sequences of one or several datasets in any order, fetched while the caller works."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from storage.states import States


class Readable(Protocol):
    """What a dataset opened for reading offers here: `storage.reader.Dataset`."""

    @property
    def threads(self) -> int:
        """Requests that are in flight at once."""

    def state_bytes(self, row: int, /) -> int:
        """Bytes of the states of sequence `row`."""

    def read(self, row: int, /) -> States:
        """Sequence `row`."""


def read_ahead(
    places: Iterable[tuple[Readable, int]], *, ahead: int | None = None, ahead_bytes: int | None = None
) -> Iterator[States]:
    """Sequences, each a dataset and a row of it, in the order given.

    ahead: sequences that are read or wait; by default 4, or 64 with `ahead_bytes`. ahead_bytes: bytes of their states
    together (the next sequence is always read, however long). Beside them lie the one the caller holds, the parts in flight
    (16 MiB for each thread that fetches, of each dataset) and idle buffers no larger than what was in use.
    """
    most = max(1, ahead if ahead is not None else 4 if ahead_bytes is None else 64)
    limit = float("inf") if ahead_bytes is None else max(0, ahead_bytes)
    todo = deque(places)
    waiting: deque[tuple[int, Future[States]]] = deque()
    held = 0
    # A few sequences at once are enough: each is fetched by all the threads of its dataset's reader.
    threads = min(most, max((dataset.threads for dataset, _ in todo), default=1))
    pool = ThreadPoolExecutor(threads, thread_name_prefix="statehouse-read")
    try:
        while todo or waiting:
            while todo and len(waiting) < most:
                dataset, row = todo[0]
                size = dataset.state_bytes(row)
                if waiting and held + size > limit:
                    break
                todo.popleft()
                waiting.append((size, pool.submit(dataset.read, row)))
                held += size
            size, future = waiting.popleft()
            states = future.result()
            del future  # or the sequence would live on until the next one is there
            held -= size
            yield states
            del states
    finally:
        pool.shutdown(cancel_futures=True)
