"""What the scheduler remembers: its slots, the units on their way (roots) and the tasks that they became."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal


class Phase(Enum):
    IDLE = "idle"
    BACKOFF = "backoff"
    STARTING = "starting"
    READY = "ready"
    GIVEN_UP = "given up"


@dataclass
class Slot:
    """barren: how often its replica was replaced since a call last succeeded on it."""

    number: int
    phase: Phase = Phase.IDLE
    generation: int = 0
    failed_starts: int = 0
    barren: int = 0
    until: float = 0.0
    began: float = 0.0  # of the start
    running: dict[int, float] = field(default_factory=dict)  # task -> when it was handed out


@dataclass
class Root:
    """A unit on its way. probes: open ones. bad: {(slot, generation): rows without a finite number}. lacking: those of them
    that came back without one each time. referee: the (slot, generation) that computed the reference states; where there is
    one slot only, it does so by other means."""

    index: int
    unit: Any
    probes: int = 0
    poison: dict[int, str] = field(default_factory=dict)
    isolations: int = 0
    bad: dict[tuple[int, int], dict[int, str]] = field(default_factory=dict)
    lacking: set[int] | None = None
    reference: Any = None
    referee: tuple[int, int] | None = None
    done: bool = False


@dataclass
class Task:
    """failed: how often on which slot. exclusive: it is suspected to have killed a replica, and runs alone."""

    number: int
    root: Root
    kind: Literal["unit", "probe", "reference"]
    rows: tuple[int, ...] = ()
    exclusive: bool = False
    failed: Counter[int] = field(default_factory=Counter)
    running: set[int] = field(default_factory=set)

    @property
    def attempts(self) -> int:
        """Those that failed."""
        return self.failed.total()

    @property
    def against(self) -> Counter[int]:
        """How much is against a slot: that it failed there, and that the states for its self-check come from there."""
        root = self.root
        if self.kind != "unit" or root.reference is None or root.referee is None:
            return self.failed
        return self.failed + Counter([root.referee[0]])
