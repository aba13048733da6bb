"""Memory that a process frees is kept for its next step, instead of being given back and asked for again."""

from __future__ import annotations

import ctypes

# <malloc.h>. Blocks of up to 32 MiB lie on the heap, whose free end is kept up to 2 GiB. Larger ones are mapped one by one,
# as always: on the heap, at 163,840 draft ids, they left holes of half as much again as all else.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Tells glibc's malloc so, for the whole process; does nothing where there is another one.

    A step of training frees and asks for the same sizes again and again. By default glibc gives the end of its heap back
    each time, so that each 4 KiB of it cost a page fault: 11,400 a step at H 256, T 512, TTT 7, 27 ms of half a second.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 32 << 20)
        mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)
