"""A replica that computes nothing: it answers each unit after a set time. What is left of a job is its scheduling.

Its module imports next to nothing, so that 64 of them start on two cores.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from ray_jobs.policies import Outcome


@dataclass(frozen=True)
class IdleUnit:
    shard: int
    tokens: int = 8192


class IdleActor:
    """One unit at a time, as in a replica; the next one already waits here."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._engine = asyncio.Lock()

    async def describe(self) -> dict[str, Any]:
        return {"engine": "idle"}

    async def alive(self) -> bool:
        return True

    async def extract(self, unit: IdleUnit) -> Outcome:
        async with self._engine:
            await asyncio.sleep(self._seconds)
        return Outcome({"shard": unit.shard})

    async def stop(self) -> None:
        pass
