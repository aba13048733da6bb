"""One item ahead: the next batch is read and decoded while this one is counted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")


def ahead(items: Iterable[Item]) -> Iterator[Item]:
    """The same items in the same order, each made in a thread while the one before it is used: two are in memory.

    Errors come where the item would have. Worth it where making one leaves the interpreter's lock alone, as Arrow's and
    zstd's decoders do.
    """
    source, end = iter(items), object()
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as pool:
        waiting = pool.submit(next, source, end)
        while (item := waiting.result()) is not end:
            waiting = pool.submit(next, source, end)
            yield item  # type: ignore[misc]
