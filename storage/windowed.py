"""Work for a few threads whose results are wanted one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(action: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[Result]:
    """action(item) of every item, in the order of the items, which are taken as they are needed.

    At most 2 x `threads` items or results are held. The first error ends it, once what runs has ended.
    """
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(action, item))
                if len(waiting) >= 2 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
