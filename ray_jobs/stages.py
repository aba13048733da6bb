"""Where the time of a replica goes: which stage of prefill, encode and upload everything else waits for.

At every moment one stage is the bottleneck: the engine while it computes; while it does not, what keeps the next unit from
it, the upload or the encoding that is still going on; otherwise the replica waits for work. So the shares sum to 1, and an
overlap that works shows as nearly all prefill.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock

STAGES = ("prefill", "upload", "encode", "wait")  # the first that runs is the bottleneck


class StageClock:
    """Counts seconds in which each stage was the bottleneck. Safe between threads."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._lock = clock, Lock()
        self._running: Counter[str] = Counter()
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._last = clock()

    @contextmanager
    def at(self, stage: str) -> Iterator[None]:
        self._change(stage, 1)
        try:
            yield
        finally:
            self._change(stage, -1)

    def _change(self, stage: str | None, by: int) -> None:
        with self._lock:
            now = self._clock()
            busy = next((one for one in STAGES if self._running[one]), "wait")
            self._seconds[busy] += now - self._last
            self._last = now
            if stage is not None:
                self._running[stage] += by

    def take(self) -> dict[str, float]:
        """Seconds since it was last asked."""
        self._change(None, 0)
        with self._lock:
            taken, self._seconds = self._seconds, dict.fromkeys(STAGES, 0.0)
        return taken


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Of each stage, in [0, 1]; they sum to 1 once any time has passed."""
    total = sum(seconds.values())
    return {stage: seconds.get(stage, 0.0) / total if total else 0.0 for stage in STAGES}
