"""What the scheduler remembers: its slots, the units on their way (roots) and the tasks that they became."""

from __future__ import annotations

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
    number: int
    phase: Phase = Phase.IDLE
    generation: int = 0
    failed_starts: int = 0
    until: float = 0.0
    began: float = 0.0  # of the start
    running: dict[int, float] = field(default_factory=dict)  # task -> when it was handed out


@dataclass
class Root:
    """A unit on its way. probes: open ones. bad: {(slot, generation): rows without a finite number}. referee: the (slot,
    generation) that computed the reference states; where there is one slot only, it does so by other means."""

    index: int
    unit: Any
    probes: int = 0
    poison: dict[int, str] = field(default_factory=dict)
    isolations: int = 0
    bad: dict[tuple[int, int], dict[int, str]] = field(default_factory=dict)
    reference: Any = None
    referee: tuple[int, int] | None = None
    done: bool = False


@dataclass
class Task:
    number: int
    root: Root
    kind: Literal["unit", "probe", "reference"]
    rows: tuple[int, ...] = ()
    attempts: int = 0
    exclusive: bool = False
    avoid: int | None = None
    running: set[int] = field(default_factory=set)
