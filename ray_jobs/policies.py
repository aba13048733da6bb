"""What the scheduler is told (units, policies, outcomes) and what it says (actions): plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable


@runtime_checkable
class Divisible(Protocol):
    """A unit whose sequences can be tried apart and left out."""

    def suspects(self) -> list[int]:
        """Indices of the sequences that the replica will be given."""

    def part(self, rows: Sequence[int]) -> Any:
        """What a probe of these sequences is called with."""

    def without(self, reasons: Mapping[int, str]) -> Any:
        """The same unit with these sequences quarantined."""

    def to_check(self) -> list[int]:
        """Indices of the sequences that a second replica forwards first, for the self-check."""


@dataclass(frozen=True)
class Restart:
    """When a dead replica starts again: seconds after the n-th start in a row that failed (0: it had been ready)."""

    first_s: float = 1.0
    most_s: float = 60.0
    attempts: int = 3

    def delay(self, failed_starts: int) -> float | None:
        """None: not again."""
        if failed_starts >= self.attempts:
            return None
        return min(self.most_s, self.first_s * 2**failed_starts)


@dataclass(frozen=True)
class Straggler:
    """Whether a unit is given to a second replica: it runs `factor` times as long as its tokens should take."""

    factor: float = 4.0
    least_s: float = 30.0

    def late(self, seconds: float, tokens: int, seconds_per_token: float | None) -> bool:
        return seconds_per_token is not None and seconds > max(self.least_s, self.factor * seconds_per_token * tokens)


@dataclass(frozen=True)
class Policies:
    in_flight: int = 2
    max_attempts: int = 3
    # Seconds after which a call counts as hung.
    unit_timeout_s: float = 3600.0
    # Seconds that a unit waits for a replica to start: for another than the one it failed on, or for its self-check.
    start_patience_s: float = 900.0
    # Quarantined sequences that are one too many; None: whatever cannot be done is an error at once.
    quarantine_limit: int | None = None
    # Calls that fail one after the other, with none that succeeds between them, before the engine is blamed and not the
    # prompts; and as many more for each replica, since all may die at once.
    fruitless: int = 16
    fruitless_per_replica: int = 4
    # How often one slot's replica is replaced with no call that succeeds on it, while others work, before it is given up: it
    # is the machine then.
    barren: int = 5
    restart: Restart = Restart()
    straggler: Straggler = Straggler()


@dataclass(frozen=True)
class Outcome:
    """What a call returned. bad: {sequence: why} of what it could not give; then nothing was stored. certain: no use in
    trying again."""

    value: Any = None
    bad: Mapping[int, str] = field(default_factory=dict)
    certain: bool = False


@dataclass(frozen=True)
class Start:
    slot: int
    generation: int


@dataclass(frozen=True)
class Kill:
    slot: int
    generation: int
    reason: str


@dataclass(frozen=True)
class Call:
    """kind: the unit itself, a probe of some of its sequences, or the reference states of its self-check."""

    slot: int
    generation: int
    task: int
    kind: Literal["unit", "probe", "reference"]
    argument: Any
    reference: Any = None


@dataclass(frozen=True)
class Done:
    index: int
    unit: Any
    value: Any


Action = Start | Kill | Call | Done


@dataclass(frozen=True)
class Step:
    """failed: why the job cannot go on. over: nothing is left to be done, or, when draining, in flight."""

    actions: tuple[Action, ...]
    over: bool = False
    failed: str | None = None


def first_line(reason: str) -> str:
    """Of a reason that may show an engine's log below, for a log line or a receipt; never empty."""
    return next((line.strip() for line in reason.splitlines() if line.strip()), "no reason given")
