"""Memory that is used again: fresh pages cost the kernel .3 to .45 s/GB, more than decoding does.

A buffer is lent as a numpy array and comes back by itself when the last array that looks at it is gone, so nobody has to
remember to return it and nobody can see it change under his hands.
"""

from __future__ import annotations

import weakref
from collections import deque
from threading import Lock, local

import numpy as np


class BufferPool:
    """Lends uint8 buffers. At most `idle_bytes` are kept for reuse; what is lent is not counted. Thread-safe."""

    def __init__(self, idle_bytes: int) -> None:
        self.idle_bytes = idle_bytes
        self._idle: list[np.ndarray] = []  # oldest first
        # Buffers come back at any instruction, even from a garbage collection inside `take`: no lock on their way in.
        self._returned: deque[np.ndarray] = deque()
        self._lock = Lock()

    def take(self, size: int) -> np.ndarray:
        """An uninitialised uint8 array of `size` bytes."""
        with self._lock:
            self._collect()
            # The tightest that fits; one more than twice as large would tie up memory that others could use.
            fitting = [at for at, memory in enumerate(self._idle) if size <= memory.nbytes <= 2 * size + 4096]
            best = min(fitting, key=lambda at: self._idle[at].nbytes, default=None)
            memory = None if best is None else self._idle.pop(best)
        if memory is None:
            memory = np.empty(_rounded(size), np.uint8)
        # An array over a memoryview: views of it keep *it* alive (numpy would skip to the owner of the memory
        # otherwise), so its end is the end of the last of them.
        lent = np.asarray(memory.data[:size])
        weakref.finalize(lent, self._give_back, memory).atexit = False
        return lent

    def _give_back(self, memory: np.ndarray) -> None:
        self._returned.append(memory)
        if self._lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._lock.release()

    def _collect(self) -> None:
        while self._returned:
            self._idle.append(self._returned.popleft())
        while self._idle and sum(memory.nbytes for memory in self._idle) > self.idle_bytes:
            self._idle.pop(0)

    def idle(self) -> int:
        """Bytes that wait for reuse."""
        with self._lock:
            self._collect()
            return sum(memory.nbytes for memory in self._idle)


def _rounded(size: int) -> int:
    """Up to an eighth larger, so that buffers for sequences of like lengths fit each other."""
    step = max(4096, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step


_scratch = local()


def thread_scratch(shape: tuple[int, ...]) -> np.ndarray:
    """This thread's own uint8 array of that shape, the same one at every call: for the planes of one chunk."""
    if getattr(_scratch, "array", None) is None or _scratch.array.shape != shape:
        _scratch.array = np.empty(shape, np.uint8)
    return _scratch.array
